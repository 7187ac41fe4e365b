"""Replacement: which layers are whose, that both give gradients to the student alone, and that draws stay in place."""

import pytest
import torch

from limbeck.architectures import blocks
from limbeck.distiller import Distiller
from limbeck.errors import LimbeckError
from limbeck.objectives import Replacement
from limbeck.objectives.base import Moment
from limbeck.objectives.replacement import grow, hold, linear
from tests.tiny import columns_for, every_family, tiny_batch, tiny_model


def pair(family="bert", depth=6, layers=3, **options):
    """A teacher, and a student with the same embeddings and classifier."""
    teacher = tiny_model(family, depth, seed=1, **options)
    student = tiny_model(family, layers, seed=2, **options)
    ours = student.state_dict()
    inner = {name for name in ours if ".layer." in name}
    student.load_state_dict(
        {n: w for n, w in teacher.state_dict().items() if n in ours and n not in inner}, strict=False
    )
    return teacher, student


def replacing(teacher, student, rate="linear", **options):
    return Distiller(teacher, student, {"labels": Replacement(rate=rate)}, steps=100, **options)


def ce(model, batch):
    logits = model(**columns_for(model, batch)).logits
    return torch.nn.functional.cross_entropy(logits, batch["labels"])


@pytest.mark.parametrize("family", every_family)
@torch.no_grad()
def test_all_or_none_is_the_student_or_the_teacher(family):
    teacher, student = pair(family)
    if len(set(getattr(teacher.config, "layer_types", None) or ())) > 1:
        with pytest.raises(LimbeckError, match=rf"layers of {family} are of several types"):
            replacing(teacher, student)
        return
    distiller = replacing(teacher, student).eval()
    batch = tiny_batch(student)
    distiller.terms["labels"].replaced.fill_(False)
    torch.testing.assert_close(distiller(**batch).loss, ce(teacher, batch), rtol=1e-4, atol=1e-5)
    distiller.terms["labels"].replaced.fill_(True)
    torch.testing.assert_close(distiller(**batch).loss, ce(student, batch), rtol=1e-4, atol=1e-5)


def test_only_the_student_learns_and_through_the_teacher():
    teacher, student = pair()
    distiller = replacing(teacher, student)
    distiller.terms["labels"].replaced.copy_(torch.tensor([True, False, False]))
    distiller(**tiny_batch(student)).loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert blocks(student)[0].get_parameter("output.dense.weight").grad.abs().sum() > 0
    assert blocks(student)[1].get_parameter("output.dense.weight").grad.abs().sum() == 0
    names = {name for name, _ in distiller.named_parameters()}
    assert names == {f"student.{name}" for name, _ in student.named_parameters()}
    assert not teacher.train(False).training
    distiller.train()
    assert not any(module.training for module in teacher.modules())


def test_uneven_depths_share_the_teacher_out():
    teacher, student = pair(depth=5, layers=3)
    hybrid = replacing(teacher, student).terms["labels"]._hybrid[0].model
    found = [[list(blocks(teacher)).index(block) for block in either.originals] for either in blocks(hybrid)]
    assert found == [[0], [1, 2], [3, 4]]


def test_rates():
    assert [grow(Moment(progress=p), over=0.5) for p in (0, 0.25, 0.5, 1)] == pytest.approx([0.1, 0.55, 1.0, 1.0])
    assert [linear(Moment(step=step)) for step in (0, 500, 1500, 9000)] == pytest.approx([0.1, 0.4, 1.0, 1.0])
    assert [hold(Moment(step=step)) for step in (0, 2499, 2500)] == [0.7, 0.7, 1.0]


def test_a_draw_is_a_function_of_seed_stage_and_step_and_stays_in_place():
    one, other = (replacing(*pair(), rate="hold(0.5)", seed=3, stage=1) for _ in range(2))
    place = one.terms["labels"].replaced.data_ptr()
    drawn = []
    for step in range(200):
        one.at(0, step)
        other.at(7, step)
        drawn.append(one.terms["labels"].replaced.tolist())
        assert drawn[-1] == other.terms["labels"].replaced.tolist()
    assert one.terms["labels"].replaced.data_ptr() == place
    assert torch.tensor(drawn).float().mean(0).tolist() == pytest.approx([0.5] * 3, abs=0.12)
    assert len({tuple(draw) for draw in drawn}) == 8


def test_another_dtype_on_either_side():
    """The student may run in half precision beside a teacher in full."""
    teacher, student = pair()
    distiller = replacing(teacher, student).eval()
    full = distiller(**tiny_batch(student)).loss
    student.bfloat16()
    torch.testing.assert_close(distiller(**tiny_batch(student)).loss, full, rtol=0.1, atol=0.1)


def test_faults():
    with pytest.raises(LimbeckError, match="replacement needs a teacher"):
        replacing(None, tiny_model())
    with pytest.raises(LimbeckError, match="one family and one width: the student is bert, width 16"):
        replacing(tiny_model(), tiny_model(layers=2, width=16))
    with pytest.raises(LimbeckError, match="the teacher roberta, width 32"):
        replacing(tiny_model("roberta"), tiny_model(layers=2))
    with pytest.raises(LimbeckError, match="models of type camembert are made is guessed"):
        replacing(tiny_model("camembert"), tiny_model("camembert", layers=2))
    with pytest.raises(LimbeckError, match='no rate "lineer"'):
        Replacement(rate="lineer")
