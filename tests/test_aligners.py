"""How two widths become one; and the guard against a loss that falls because everything became one vector."""

import inspect

import pytest
import torch
from torch import nn

from limbeck.aligners import ALIGNERS, Anchor
from limbeck.distances import unit_sq

STUDENT, TEACHER, PAIRS = 6, 10, 3


def sides(student=STUDENT, teacher=TEACHER, rows=(2, 4)):
    generator = torch.Generator().manual_seed(0)
    return (
        [torch.randn(*rows, student, generator=generator) for _ in range(PAIRS)],
        [torch.randn(*rows, teacher, generator=generator) for _ in range(PAIRS)],
    )


def by_hand(weight, bias, vector):
    return [sum(w * x for w, x in zip(row, vector)) + b for row, b in zip(weight.tolist(), bias)]


def check_linear(found, linear, source):
    bias = [0.0] * linear.weight.shape[0] if getattr(linear, "bias", None) is None else linear.bias.tolist()
    for i in range(source.shape[0]):
        for j in range(source.shape[1]):
            expected = by_hand(linear.weight, bias, source[i, j].tolist())
            assert found[i, j].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


# name -> the vectors a side, their widths, the number of maps of the student and of the teacher that train
CASES = {
    "none": ("none", STUDENT, (PAIRS, STUDENT), 0),
    "linear": ("linear", TEACHER, (PAIRS, TEACHER), PAIRS),
    "shared": ("shared", TEACHER, (PAIRS, TEACHER), 1),
    "both": ("both", TEACHER, (PAIRS, 128), PAIRS),
    "concat": ("concat", TEACHER, (1, 128), 1),
}


def test_every_aligner_has_a_case():
    assert {*CASES, "filters"} == set(ALIGNERS)  # filters need the models: test_filters.py


@pytest.mark.parametrize("name", CASES)
def test_shapes_and_what_trains(name):
    _, teacher, (count, width), trained = CASES[name]
    aligner = ALIGNERS[name](STUDENT, teacher, PAIRS)
    left, right = aligner(*sides(teacher=teacher))
    assert [tuple(x.shape) for x in left] == [(2, 4, width)] * count
    assert [tuple(x.shape) for x in right] == [(2, 4, width)] * count
    weights = [p for p in aligner.parameters() if p.dim() == 2]
    assert len(weights) == trained
    inputs = STUDENT * PAIRS if name == "concat" else STUDENT
    assert all(w.shape == (width, inputs) for w in weights)


@pytest.mark.parametrize("name", ["none", "linear"])
def test_equal_widths_are_left_as_they_are(name):
    aligner = ALIGNERS[name](STUDENT, STUDENT, PAIRS)
    ours, theirs = sides(teacher=STUDENT)
    left, right = aligner(ours, theirs)
    assert all(a is b for a, b in zip(left + right, ours + theirs))
    assert len(left) == len(right) == PAIRS
    assert not list(aligner.parameters())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [{}, {"train_teacher": True}, {"always": True}])
def test_layers_in_one_tensor_are_layers_in_a_list(name, options):
    """Values, and the gradients of inputs and of maps."""
    taken = inspect.signature(ALIGNERS[name]).parameters
    torch.manual_seed(0)
    aligner = ALIGNERS[name](
        STUDENT, CASES[name][1], PAIRS, **{k: v for k, v in options.items() if k in taken}
    ).double()
    ours, theirs = (torch.stack(side).double() for side in sides(teacher=CASES[name][1], rows=(4,)))
    found = {}
    for as_list in (False, True):
        inputs = [side.clone().requires_grad_() for side in (ours, theirs)]
        given = [list(side.unbind()) for side in inputs] if as_list else inputs
        aligner.zero_grad()
        left, right = aligner(*given)
        sum((one * one.sin()).sum() for one in [*left, *right]).backward()
        found[as_list] = [*left, *right, *(side.grad for side in inputs), *(p.grad for p in aligner.parameters())]
    for together, apart in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(together, apart)


def test_none_knows_whether_it_fits():
    assert ALIGNERS["none"](6, 6, 1).fits
    assert not ALIGNERS["none"](6, 7, 1).fits


@pytest.mark.parametrize("teacher", [TEACHER, STUDENT])
def test_linear_maps_each_layer_of_the_student_by_its_own_map(teacher):
    aligner = ALIGNERS["linear"](STUDENT, teacher, PAIRS, always=True)
    ours, theirs = sides(teacher=teacher)
    left, right = aligner(ours, theirs)
    assert len({m.weight.data_ptr() for m in aligner.maps}) == PAIRS
    for found, linear, source in zip(left, aligner.maps, ours, strict=True):
        check_linear(found, linear, source)
    assert all(a is b for a, b in zip(right, theirs, strict=True))


def test_shared_maps_every_layer_by_one_map_at_equal_widths_too():
    for teacher in (TEACHER, STUDENT):
        aligner = ALIGNERS["shared"](STUDENT, teacher, PAIRS)
        ours, theirs = sides(teacher=teacher)
        left, right = aligner(ours, theirs)
        for found, source in zip(left, ours, strict=True):
            check_linear(found, aligner.map, source)
        assert all(a is b for a, b in zip(right, theirs, strict=True))


@pytest.mark.parametrize("train_teacher", [False, True])
def test_both_maps_each_layer_of_each_side(train_teacher):
    aligner = ALIGNERS["both"](STUDENT, TEACHER, PAIRS, width=5, train_teacher=train_teacher)
    ours, theirs = sides()
    left, right = aligner(ours, theirs)
    for found, linear, source in zip(left + right, [*aligner.student, *aligner.teacher], ours + theirs, strict=True):
        assert found.shape[-1] == 5
        check_linear(found, linear, source)


@pytest.mark.parametrize("train_teacher", [False, True])
def test_concat_joins_a_sides_layers_in_order(train_teacher):
    aligner = ALIGNERS["concat"](STUDENT, TEACHER, PAIRS, width=5, train_teacher=train_teacher)
    ours, theirs = sides()
    (left,), (right,) = aligner(ours, theirs)
    for found, linear, side in [(left, aligner.student, ours), (right, aligner.teacher, theirs)]:
        joined = torch.tensor(
            [[[x for layer in side for x in layer[i, j].tolist()] for j in range(4)] for i in range(2)]
        )
        check_linear(found, linear, joined)


def teacher_maps(aligner):
    return list(aligner.teacher) if isinstance(aligner.teacher, nn.ModuleList) else [aligner.teacher]


@pytest.mark.parametrize("name", ["both", "concat"])
@pytest.mark.parametrize("width", [4, 64])
def test_the_teachers_side_never_trains(name, width):
    aligner = ALIGNERS[name](STUDENT, TEACHER, PAIRS, width=width)
    assert not any(key.startswith("teacher") for key, _ in aligner.named_parameters())
    for anchor in teacher_maps(aligner):
        assert isinstance(anchor, Anchor)
        assert not anchor.weight.requires_grad
        assert getattr(anchor, "bias", None) is None
        weight = anchor.weight if anchor.weight.shape[0] <= anchor.weight.shape[1] else anchor.weight.T
        torch.testing.assert_close(weight @ weight.T, torch.eye(len(weight)), rtol=0, atol=1e-5)
    # saved beside the student all the same: a reloaded aligner compares as before
    assert any(key.startswith("teacher") for key in aligner.state_dict())
    assert all(m.bias is not None for m in aligner.modules() if isinstance(m, nn.Linear))


@pytest.mark.parametrize("name", ["both", "concat"])
def test_the_teachers_side_trains_if_told(name):
    aligner = ALIGNERS[name](STUDENT, TEACHER, PAIRS, train_teacher=True)
    for linear in teacher_maps(aligner):
        assert isinstance(linear, nn.Linear)
        assert linear.weight.requires_grad
        assert linear.bias is None
    assert any(key.startswith("teacher") for key, _ in aligner.named_parameters())


@pytest.mark.parametrize("name", ["both", "concat"])
def test_gradients_reach_the_students_side_and_the_features(name):
    aligner = ALIGNERS[name](STUDENT, TEACHER, PAIRS, width=5)
    ours, theirs = sides()
    ours = [x.requires_grad_() for x in ours]
    left, right = aligner(ours, theirs)
    sum(unit_sq(a, b).sum() for a, b in zip(left, right)).backward()
    assert all(x.grad.abs().sum() > 0 for x in ours)
    assert all(p.grad.abs().sum() > 0 for p in aligner.parameters())


@pytest.mark.parametrize("name", ["both", "concat"])
def test_the_loss_on_unrelated_features_collapses_only_if_both_sides_train(name):
    """With nothing to learn, a falling loss means that the maps forgot their inputs.

    As hidden states do, the features have a mean, which is all that a collapsed map keeps of them.
    """
    torch.manual_seed(0)
    ours, theirs = ([torch.randn(256, 16) + 0.6 * torch.randn(16) for _ in range(2)] for _ in range(2))
    ended = {}
    for train_teacher in (False, True):
        torch.manual_seed(1)
        aligner = ALIGNERS[name](16, 16, 2, width=8, train_teacher=train_teacher)
        optimizer = torch.optim.Adam(aligner.parameters(), lr=0.05)
        for _ in range(120):
            left, right = aligner(ours, theirs)
            loss = sum(unit_sq(a, b).mean() for a, b in zip(left, right)) / len(left)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ended[train_teacher] = loss.item()
    assert ended[False] > 0.5, ended  # 0.77 and 0.80
    assert ended[True] < 0.1, ended  # 0.02 and 0.0002
