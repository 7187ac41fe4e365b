"""How several teacher layers become one, row by row against plain loops. A blend without a case fails."""

import math

import pytest
import torch

from limbeck.aligners import Anchor
from limbeck.blends import BLENDS

WIDTH, ROWS = 3, 4
GROUPS = [[0, 1], [1, 2, 3]]


def layers(count, seed):
    return list(torch.randn(count, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


STUDENT, TEACHER = layers(2, 0), layers(4, 1)


def attended(blend, s, group, row):
    energies = [math.exp(sum(float(a * b) for a, b in zip(STUDENT[s][row], TEACHER[t][row]))) for t in group]
    shares = [e / sum(energies) for e in energies]
    return shares, [sum(w * float(TEACHER[t][row][d]) for w, t in zip(shares, group)) for d in range(WIDTH)]


def combined(blend, s, group, row):
    joined = [float(x) for t in group for x in TEACHER[t][row]]
    weight = blend.maps[s].weight.tolist()
    bias = [0.0] * WIDTH if isinstance(blend.maps[s], Anchor) else blend.maps[s].bias.tolist()
    norms = [
        math.sqrt(sum(weight[d][i * WIDTH + e] ** 2 for d in range(WIDTH) for e in range(WIDTH)))
        for i in range(len(group))
    ]
    target = [sum(w * x for w, x in zip(weight[d], joined)) + bias[d] for d in range(WIDTH)]
    return [n / sum(norms) for n in norms], target


CASES = [("attention", {}, attended), ("combine", {}, combined), ("combine", {"frozen": True}, combined)]


def test_every_blend_has_a_case():
    assert {name for name, *_ in CASES} == set(BLENDS)


@pytest.mark.parametrize(("name", "options", "reference"), CASES)
def test_targets_and_weights(name, options, reference):
    blend = BLENDS[name](WIDTH, GROUPS, **options).double()
    for parameter in blend.parameters():
        torch.nn.init.normal_(parameter)
    targets, weights = blend(STUDENT, TEACHER), blend.weights(STUDENT, TEACHER)
    assert len(targets) == len(weights) == len(GROUPS)
    for s, group in enumerate(GROUPS):
        for row in range(ROWS):
            shares, target = reference(blend, s, group, row)
            assert targets[s][row].tolist() == pytest.approx(target, rel=1e-10)
            found = weights[s][row] if weights[s].dim() > 1 else weights[s]
            assert found.tolist() == pytest.approx(shares, rel=1e-10)


def test_attention_reaches_the_student_through_its_weights():
    student = [s.clone().requires_grad_() for s in STUDENT]
    target = BLENDS["attention"](WIDTH, GROUPS)(student, TEACHER)[0]
    (gradient,) = torch.autograd.grad(target.sum(), student[0])
    assert gradient.abs().min() > 0


def test_a_combination_starts_as_the_mean_of_its_layers():
    for target, group in zip(BLENDS["combine"](WIDTH, GROUPS).double()(STUDENT, TEACHER), GROUPS):
        torch.testing.assert_close(target, sum(TEACHER[i] for i in group) / len(group))


def test_a_frozen_combination_has_nothing_to_train_but_is_saved():
    blend = BLENDS["combine"](WIDTH, GROUPS, frozen=True)
    assert not list(blend.parameters())
    for saved in blend.state_dict().values():
        torch.testing.assert_close(saved @ saved.T, torch.eye(WIDTH))
