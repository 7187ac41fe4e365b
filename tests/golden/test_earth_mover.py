"""Layers matched by the cheapest transport between them, solved here as a general linear program."""

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from tests.golden.test_blends import per_example
from tests.test_golden import EXACT, Case, close, linear

RECIPES = {"bert-emd", "bert-emd:code", "emd-ild", "emd-ild:code"}
HEADS = 4


def learning(case):
    """As when training, dropout aside: what an objective keeps moves only then."""
    case.distiller.train()
    case.student.eval()


def products(model, seen, layer):
    """q·kᵀ/√d of a layer, from the states below it."""
    parts = model.bert.encoder.layer[layer - 1].attention.self
    below = seen.hidden_states[layer - 1]
    q, k = (linear(part, below).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (parts.query, parts.key))
    return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5


def distance(case, kind, s, t, fit):
    """Of student layer s from teacher layer t, a mean over the examples."""
    if kind == "hidden":
        ours, theirs = linear(fit, case.s.hidden_states[s]), case.t.hidden_states[t]
        return per_example(case, lambda i, n: (ours[i, :n] - theirs[i, :n]).square().mean())
    ours, theirs = products(case.student, case.s, s), products(case.teacher, case.t, t)
    if kind == "scores":
        return per_example(case, lambda i, n: (ours[i, :, :n, :n] - theirs[i, :, :n, :n]).square().mean())
    p, q = (lambda i, n, x=x: x[i, :, :n, :n].softmax(-1) for x in (theirs, ours))
    return per_example(case, lambda i, n: (p(i, n) * (p(i, n) / q(i, n)).log()).sum(-1).mean())


def transport(costs, rows, columns):
    """The cheapest flow, by a general linear program."""
    m, n = costs.shape
    sums = [np.kron(np.eye(m)[i], np.ones(n)) for i in range(m)] + [np.kron(np.ones(m), np.eye(n)[j]) for j in range(n)]
    found = linprog(costs.ravel(), A_eq=np.array(sums), b_eq=np.concatenate([rows, columns]), method="highs")
    return found.x.reshape(m, n)


def new_weights(spent, weights, softmax):
    """What a layer spent for each unit of its weight, turned round."""
    each = spent / weights
    turned = each.sum() / each
    turned = np.exp(turned) if softmax else turned
    return turned / turned.sum()


def embedded(case, fit):
    """The squared error of the embeddings, a mean over the examples."""
    ours, theirs = linear(fit, case.s.hidden_states[0]), case.t.hidden_states[0]
    return per_example(case, lambda i, n: (ours[i, :n] - theirs[i, :n]).square().mean())


@pytest.mark.parametrize("width", [32, 16])
@pytest.mark.parametrize(
    ("recipe", "kinds", "softmax"),
    [
        ("bert-emd", ("hidden", "scores"), True),
        ("bert-emd:code", ("hidden", "scores"), False),
        ("emd-ild", ("attention", "hidden"), False),
    ],
)
def test_earth_mover(recipe, kinds, softmax, width):
    """Σ f·d for each feature, f the flow of the weights as they are; then these move, the same for each feature."""
    case = Case(recipe, width=width)
    term = case.distiller.terms["layers"]
    fit = next(grid.aligner.map for grid in term.grids if grid.call.name == "hidden")
    with torch.no_grad():
        grids = {k: np.array([[distance(case, k, s, t, fit) for t in range(1, 7)] for s in (1, 2, 3)]) for k in kinds}
        rest = torch.tensor(0.0, dtype=torch.float64)
        if recipe != "emd-ild":
            rest = embedded(case, fit)
    logs = case.t.logits.log_softmax(-1), case.s.logits.log_softmax(-1)
    soft = -(logs[0].exp() * logs[1]).sum(-1).mean()
    if recipe == "bert-emd:code":  # the same gradient, over as many classes
        soft = (logs[0].exp() * (logs[0] - logs[1])).mean()
    sends, takes = np.full(3, 1 / 3), np.full(6, 1 / 6)
    learning(case)
    for _ in range(3):
        flows = {k: transport(grid, sends, takes) for k, grid in grids.items()}
        layers = torch.tensor(sum((flows[k] * grids[k]).sum() for k in kinds))
        expected = layers if recipe == "emd-ild" else soft + 0.01 * (rest + layers)
        torch.testing.assert_close(case.loss(), expected, **EXACT)
        spent = [flows[k] * grids[k] for k in kinds]
        sends = np.mean([new_weights(s.sum(1), sends, softmax) for s in spent], 0)
        takes = np.mean([new_weights(s.sum(0), takes, softmax) for s in spent], 0)
        np.testing.assert_allclose(term.sends.numpy(), sends, rtol=1e-10)
        np.testing.assert_allclose(term.takes.numpy(), takes, rtol=1e-10)


@pytest.mark.parametrize("width", [32, 16])
def test_emd_ild_as_its_code(width):
    """Scores and states each have weights of their own, which what was spent on the other does not move."""
    case = Case("emd-ild:code", width=width)
    terms = {"scores": case.distiller.terms["attention"], "hidden": case.distiller.terms["hidden"]}
    fit = terms["hidden"].grids[0].aligner.map
    assert case.distiller.terms["embeddings"].aligner.map is fit
    with torch.no_grad():
        grids = {k: np.array([[distance(case, k, s, t, fit) for t in range(1, 7)] for s in (1, 2, 3)]) for k in terms}
        rest = embedded(case, fit)
    weights = {k: (np.full(3, 1 / 3), np.full(6, 1 / 6)) for k in terms}
    learning(case)
    for _ in range(3):
        flows = {k: transport(grids[k], *weights[k]) for k in terms}
        layers = torch.tensor(sum((flows[k] * grids[k]).sum() for k in terms))
        torch.testing.assert_close(case.loss(), rest + layers, **EXACT)
        for k, term in terms.items():
            spent = flows[k] * grids[k]
            weights[k] = tuple(new_weights(spent.sum(1 - i), weights[k][i], False) for i in (0, 1))
            np.testing.assert_allclose(term.sends.numpy(), weights[k][0], rtol=1e-10)
            np.testing.assert_allclose(term.takes.numpy(), weights[k][1], rtol=1e-10)
            assert term.restart
    assert not np.allclose(weights["scores"][1], weights["hidden"][1])


def test_emd_ild_ends_with_the_predictions():
    case = Case("emd-ild", stage=1)
    close(case.loss(), -(case.t.logits.softmax(-1) * case.s.logits.log_softmax(-1)).sum(-1).mean())
    coded = Case("emd-ild:code", stage=1)
    close(coded.loss(), 4 * coded.kl(2))
