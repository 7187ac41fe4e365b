"""A projector is there while a student trains, and gone from what is saved; the answers stay."""

import copy

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from limbeck import architectures
from limbeck.features import LOGITS, last_token
from limbeck.initialisers import start_student
from limbeck.projector import folded
from limbeck.taps import Tap
from tests.tiny import causal, columns_for, every_family, tiny_batch, tiny_model

families = pytest.mark.parametrize("family", every_family)
two_maps = pytest.mark.parametrize("family", [family for family in every_family if family not in causal])


def started(family, width, *, call="classifier(frozen=true, project=true)", teacher=None, seed=0):
    """A student of two layers under the classifier of a teacher of width 32, its projector as if trained."""
    source = tiny_model(family, 2, width=width, seed=7)
    start = start_student(
        ["layers", call], teacher or tiny_model(family, 4, seed=1), source, labels={"num_labels": 3}, seed=seed
    )
    if (projector := architectures.projector(start.student)) is not None:
        with torch.no_grad():
            generator = torch.Generator().manual_seed(2)
            for parameter in projector.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    start.student.eval()
    return start


def logits(model):
    with torch.no_grad():
        return model(**columns_for(model, tiny_batch(model))).logits


@families
@pytest.mark.parametrize("width", [32, 16, 48])
def test_folding_keeps_the_answers(family, width):
    student = started(family, width).student
    single = copy.deepcopy(student)
    saved = folded(single)
    torch.testing.assert_close(logits(saved), logits(student), rtol=1e-6, atol=3e-6)
    if not family.startswith("gemma"):  # double() does not reach what they round to fp32 when they are built
        exact = copy.deepcopy(student).double()
        torch.testing.assert_close(logits(folded(exact)), logits(exact), rtol=1e-10, atol=1e-10)
    assert architectures.projector(saved) is None
    assert not saved.training
    same = student.state_dict()
    assert single.state_dict().keys() == same.keys()  # the student itself goes on training
    for name, weight in saved.state_dict().items():
        if not name.startswith(architectures.family(student).dense):
            assert torch.equal(weight, same[name])


@families
def test_at_equal_width_the_saved_student_is_a_plain_model(family):
    student = started(family, 32).student
    saved = folded(student)
    plain = tiny_model(family, 2)
    assert type(saved) is type(plain)
    assert saved.state_dict().keys() == plain.state_dict().keys()
    assert saved.config.to_dict() == student.config.to_dict() | {"architectures": saved.config.architectures}


@pytest.mark.parametrize("family", causal)
def test_one_map_takes_the_projector_up_at_any_width(family):
    saved = folded(started(family, 16).student)
    assert type(saved) is type(tiny_model(family, 2))
    assert architectures.shape(saved)[:5] == (2, 16, 4, 3, 16)


@two_maps
def test_a_narrower_student_has_a_class_of_its_own(family, tmp_path):
    saved = folded(started(family, 16).student)
    assert saved.config.model_type == f"limbeck-{family}"
    assert architectures.shape(saved)[:5] == (2, 16, 4, 3, 16)
    assert architectures.output_map(saved).in_features == saved.config.head_size == 32
    saved.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors", "wide_head.py"}
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(saved)
    assert torch.equal(logits(loaded), logits(saved))


@two_maps
@torch.no_grad()
def test_the_classifier_is_the_teachers_and_the_projector_is_not_frozen(family):
    teacher = tiny_model(family, 4, seed=1)
    start = started(family, 16, teacher=teacher)
    student = start.student
    assert start.frozen == {
        name
        for name, _ in student.named_parameters()
        if name.startswith(tuple(architectures.head(student))) and ".projector." not in name
    }
    assert "a learnt map from width 16 to 32" in start.notes[-1]
    seen = {}
    model = tiny_batch(student)
    handle = architectures.dense_map(student).register_forward_pre_hook(lambda _, args: seen.update(read=args[0]))
    own = student(**columns_for(student, model), output_hidden_states=True)
    handle.remove()
    projector = architectures.projector(student)
    torch.testing.assert_close(projector(own.hidden_states[-1][:, 0]), seen["read"])
    activate = {"tanh": torch.tanh, "relu": torch.relu, "gelu": torch.nn.functional.gelu}
    word = architectures.classifier_form(teacher).split()[1]
    inner = activate[word](architectures.dense_map(teacher)(seen["read"]))
    if family == "modernbert":
        inner = teacher.head.norm(inner)
    torch.testing.assert_close(architectures.output_map(teacher)(inner), own.logits)


@families
@pytest.mark.parametrize("width", [32, 16])
@pytest.mark.parametrize("call", ["classifier", "classifier(project=true)"])
@torch.no_grad()
def test_classifier_input_is_what_the_classifier_reads(family, width, call):
    student = started(family, width, call=call).student
    batch, seen = tiny_batch(student), []
    handle = architectures.dense_map(student).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    student(**columns_for(student, batch))
    handle.remove()
    site = ("classifier_input", LOGITS)
    for sites in ([site], [site, ("cls", 1)], [site, ("logits", LOGITS)]):
        rows = Tap(student, sites)(**batch)[site]
        read = last_token(seen[0], batch["attention_mask"]) if family in causal else seen[0]
        torch.testing.assert_close(rows.values, read)
        assert rows.mask.all()


def test_a_projector_starts_without_changing_lengths():
    teacher = tiny_model("bert", 4, seed=1)
    options = {"labels": {"num_labels": 3}, "seed": 0}
    start = start_student(["layers", "classifier(project=true)"], teacher, teacher, depth=2, **options)
    plain = start_student(["layers", "classifier"], teacher, teacher, depth=2, **options)
    assert architectures.projector(plain.student) is None
    assert torch.equal(logits(start.student.eval()), logits(plain.student.eval()))
    narrow = [started("bert", 16, seed=seed) for seed in (0, 0, 1)]
    weights = [architectures.projector(start.student).weight for start in narrow]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])  # it is drawn, from the run's seed
    fresh = start_student(["random", "classifier"], teacher, teacher, depth=2, width=16, **options).student
    state = torch.randn(5, 16)
    torch.testing.assert_close(architectures.projector(fresh)(state).norm(dim=1), state.norm(dim=1))


@two_maps
def test_a_student_of_such_a_student(family):
    """Its classifier is reused as any other, at its own width and at a narrower one."""
    middle = folded(started(family, 24).student)
    same = started(family, 24, call="classifier", teacher=middle).student
    assert architectures.projector(same) is None
    assert type(folded(same)) is type(middle)
    assert torch.equal(logits(folded(same)), logits(same))
    narrow = started(family, 8, teacher=middle).student
    assert architectures.shape(narrow).reads == 24
    saved = folded(narrow)
    assert saved.config.head_size == 32
    torch.testing.assert_close(logits(saved), logits(narrow), rtol=1e-6, atol=3e-6)


def test_a_student_without_a_projector_is_saved_as_it_is():
    student = tiny_model("bert", 2)
    assert folded(student) is student
