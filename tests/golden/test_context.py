"""Relations among an example's words, and among a word's layers, state by state."""

import itertools

import pytest
import torch

from tests.golden.test_blends import per_example
from tests.test_golden import Case, close

RECIPES = {"ckd-context", "ckd-context:code"}
UNIFORM = [(0, 0), (1, 2), (2, 4), (3, 6)]  # with the embeddings


def divergence(ours, theirs):
    """KL of the softmaxes of two lists of cosines."""
    p, q = (torch.stack(list(cosines)).softmax(-1) for cosines in (theirs, ours))
    return (p * (p / q).log()).sum()


def cosine(a, b):
    norms = a.norm() * b.norm()
    return a @ b / norms if norms > 0 else torch.zeros((), dtype=a.dtype)


def pairs(states):
    """For each state, its cosines with the others."""
    return [[cosine(a, b) for j, b in enumerate(states) if j != i] for i, a in enumerate(states)]


def pair_loss(ours, theirs):
    """Summed over all rows and divided by how many pairs there are."""
    losses = [divergence(a, b) for a, b in zip(pairs(ours), pairs(theirs))]
    return torch.stack(losses).sum() / len(ours) ** 2


def angles(states, reach):
    """The cosine at state i between the rays to j and k, all three no further than `reach` apart."""
    near = lambda i: range(max(i - reach, 0), min(i + reach + 1, len(states)))
    return torch.stack(
        [
            cosine(states[j] - states[i], states[k] - states[i])
            for i in range(len(states))
            for j, k in itertools.product(near(i), repeat=2)
        ]
    )


def angle_loss(ours, theirs, reach=10):
    return (angles(ours, reach) - angles(theirs, reach)).square().mean()


def over_words(case, loss):
    """The mean over the aligned layers of a loss among an example's tokens."""
    found = []
    for ours, theirs in ((case.s.hidden_states[s], case.t.hidden_states[t]) for s, t in UNIFORM):
        found.append(per_example(case, lambda i, n, a=ours, b=theirs: loss(a[i, :n], b[i, :n])))
    return torch.stack(found).mean()


def over_layers(case, loss):
    """The mean over an example's tokens of a loss among a token's aligned layers."""
    ours, theirs = (torch.stack([m.hidden_states[p[k]] for p in UNIFORM]) for k, m in ((0, case.s), (1, case.t)))
    return per_example(case, lambda i, n: torch.stack([loss(ours[:, i, w], theirs[:, i, w]) for w in range(n)]).mean())


@pytest.mark.parametrize(
    ("recipe", "task", "hard", "soft", "temperature", "weights"),
    [
        ("ckd-context", None, 0.5, 0.5, 3, (1, 1)),
        ("ckd-context", "sst2", 0.1, 0.9, 4, (100, 1000)),
        ("ckd-context", "mrpc", 0.3, 0.7, 4, (1, 1)),
        ("ckd-context", "qqp", 0.1, 0.9, 2, (10, 10)),
        ("ckd-context:code", "rte", 0, 1, 3, (1, 10)),
    ],
)
def test_ckd_context(recipe, task, hard, soft, temperature, weights):
    """Labels and soft CE at T without T², four relations: KL of pairs, MSE of angles, words and layers."""
    case = Case(recipe, task=task, width=16)
    p, q = ((m.logits / temperature).softmax(-1) for m in (case.t, case.s))
    expected = hard * case.ce() - soft * (p * q.log()).sum(-1).mean()
    expected = expected + weights[0] * over_words(case, pair_loss) + weights[1] * over_words(case, angle_loss)
    close(case.loss(), expected + over_layers(case, pair_loss) + over_layers(case, angle_loss))
