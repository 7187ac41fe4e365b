"""Which negatives are drawn, what the banks keep, and that it learns. Values are in tests/golden."""

import random

import pytest
import torch

from limbeck.architectures import Shape
from limbeck.data.kinds import KINDS
from limbeck.data.plan import FILL
from limbeck.errors import LimbeckError
from limbeck.objectives import Contrast, Models, Moment
from tests.test_objectives import draw, one_row

LABELS = torch.tensor([2, 0, 1, 1, 0, 2, 2, 1, 0, 0, 1, 2])
STUDENT, TEACHER = Shape(2, 4, 2, 3), Shape(4, 6, 2, 3)


def term(labels=LABELS, *, regression=False, seed=0, **options):
    found = Contrast("cls", map="lowest", **options)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        found.bind(
            Models(STUDENT, TEACHER, KINDS["regression" if regression else "classification"], train_labels=labels), {}
        )
    found.at(Moment())
    return found.double().train()


def sides(ids):
    """Each example's own states."""
    ours, theirs = draw(2, len(LABELS), 4, seed=1), draw(2, len(LABELS), 6, seed=2)
    at = torch.tensor(ids).clamp_min(0)
    return (
        {("cls", s): one_row(ours[s - 1, at]) for s in (1, 2)},
        {("cls", t): one_row(theirs[i, at]) for i, t in enumerate((1, 3))},
        {"id": torch.tensor(ids), "weight": torch.tensor([float(i != FILL) for i in ids])},
    )


def test_negatives_are_of_other_classes_each_about_as_often():
    found = term(negatives=3000).others(torch.arange(len(LABELS)))
    for example, drawn in enumerate(found):
        allowed = [i for i in range(len(LABELS)) if LABELS[i] != LABELS[example]]
        counts = drawn.bincount(minlength=len(LABELS))
        assert counts[allowed].sum() == 3000
        assert all(300 < count < 450 for count in counts[allowed])  # 375 of 8, with 4 standard deviations of 18


def test_on_a_score_every_other_example_is_a_negative():
    found = term(torch.linspace(0, 1, 12), regression=True, negatives=2000).others(torch.tensor([3]))
    assert set(found[0].tolist()) == set(range(12)) - {3}


def test_a_draw_is_a_function_of_seed_stage_epoch_and_example():
    found, ids = term(), torch.tensor([4, 1, 7])
    first = found.others(ids)
    assert torch.equal(found.others(ids[[2, 0]]), first[[2, 0]])
    for moment in (Moment(seed=1), Moment(stage=1), Moment(epoch=1)):
        found.at(moment)
        assert not torch.equal(found.others(ids), first)
    found.at(Moment())
    assert torch.equal(found.others(ids), first)
    assert torch.equal(term(seed=1).others(ids), first)


def splitmix(place):
    """The finaliser of SplitMix64, in whole numbers."""
    place %= 2**64
    place = (place ^ (place >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    place = (place ^ (place >> 27)) * 0x94D049BB133111EB % 2**64
    return (place ^ (place >> 31)) % 2**63


def test_draws_are_a_known_hash():
    found = term(negatives=8)
    key = random.Random("0/0/0").getrandbits(62)
    for example, drawn in zip((0, 5, 11), found.others(torch.tensor([0, 5, 11])).tolist()):
        sorted_ids = sorted(range(len(LABELS)), key=lambda i: (int(LABELS[i]), i))
        others = [i for i in sorted_ids if LABELS[i] != LABELS[example]]
        assert drawn == [others[splitmix(key + 8 * example + k) % len(others)] for k in range(8)]


def test_fill_and_order_change_nothing():
    one, other = term(), term()
    found = one(*sides([3, 8, 5]))
    shuffled = other(*sides([5, FILL, 3, FILL, 8]))
    torch.testing.assert_close(shuffled[[2, 4, 0]], found)
    for name in ("student_bank", "teacher_bank"):
        torch.testing.assert_close(one.get_buffer(name), other.get_buffer(name))
    torch.testing.assert_close(one.totals, other.totals)


def test_a_piece_of_nothing_but_fill():
    found = term()
    before = found.student_bank.clone()
    assert found(*sides([FILL, FILL])).isfinite().all()
    assert torch.equal(found.student_bank, before)
    assert torch.equal(found.totals, torch.zeros(2, dtype=torch.float64))


def test_banks_move_when_training_only():
    found = term()
    before = {name: buffer.clone() for name, buffer in found.named_buffers()}
    found.eval()(*sides([3, 8, 5]))
    assert all(torch.equal(before[name], buffer) for name, buffer in found.named_buffers())
    found.train()(*sides([3, 8, 5]))
    moved = (found.teacher_bank != before["teacher_bank"]).any(1).nonzero().flatten()
    assert moved.tolist() == [3, 5, 8]
    torch.testing.assert_close(found.teacher_bank[:-1].norm(dim=-1), torch.ones(12, dtype=torch.float64))


def test_a_checkpoint_holds_banks_and_not_what_the_labels_say():
    assert set(term().state_dict()) == {
        "student_bank", "teacher_bank", "totals", "maps.student.weight", "maps.student.bias", "maps.teacher.weight",
        "maps.teacher.bias",
    }  # fmt: skip


def test_it_learns_to_tell_examples_apart():
    found = term(width=16)
    optimizer = torch.optim.Adam(found.parameters(), lr=1e-2)
    history = []
    for _ in range(300):
        loss = found(*sides(list(range(len(LABELS))))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(float(loss.detach()))
    assert history[-1] < 0.1 * history[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"negatives": 0}, "negatives 0 must be"),
        ({"temperature": "x"}, "temperature x must be"),
        ({"momentum": 1}, "momentum 1 must be a number from 0 to below 1"),
        ({"momentum": "fast"}, "momentum fast must be a number"),
        ({"labels": None}, "labelled data"),
        ({"labels": torch.zeros(5)}, "one only"),
    ],
)
def test_faults(options, said):
    with pytest.raises(LimbeckError, match=said):
        term(**options)


def test_more_faults():
    with pytest.raises(LimbeckError, match="cls or mean"):
        Contrast("hidden", map="lowest")
    with pytest.raises(LimbeckError, match="needs a teacher"):
        Contrast("cls", map="lowest").bind(Models(STUDENT, None, train_labels=LABELS), {})
    with pytest.raises(LimbeckError, match="once and for all"):
        Contrast("cls", map="random").bind(Models(STUDENT, TEACHER, train_labels=LABELS), {})
    ours, theirs, _ = sides([1])
    with pytest.raises(LimbeckError, match="column id"):
        term()(ours, theirs, {})
