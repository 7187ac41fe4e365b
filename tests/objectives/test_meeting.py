"""Matches of several teacher layers at once: how much each meets, and what cannot be."""

import pytest
import torch

from limbeck.errors import LimbeckError
from limbeck.objectives import EarthMover, Match, Models
from tests.test_objectives import MASK, bound, features, models, one_row, tokens


def cls(model, layer):
    return one_row(tokens(model, layer).values[:, 0])


def test_attention_weights_of_a_batch():
    term = bound(Match("hidden", map="groups(overlap)", blend="attention"))
    sides = features(term, "hidden", tokens)
    found = term.layer_weights(*sides, {})
    assert found.shape == (3, 6)
    groups = [(1, 2, 3), (2, 3, 4, 5), (4, 5, 6)]
    for s, group in enumerate(groups):
        rows = [
            torch.stack([(ours @ sides[1]["hidden", t].values[i, w]) for t in group]).softmax(-1)
            for i, w in MASK.nonzero().tolist()
            for ours in [sides[0]["hidden", s + 1].values[i, w]]
        ]
        expected = torch.zeros(6, dtype=torch.float64)
        expected[[t - 1 for t in group]] = torch.stack(rows).mean(0)
        torch.testing.assert_close(found[s].double(), expected, rtol=1e-6, atol=1e-6)


def test_plain_pairs_meet_wholly():
    term = bound(Match("cls", map="uniform"))
    found = term.layer_weights(*features(term, "cls", cls), {})
    assert torch.equal(found, torch.eye(3))
    drawn = bound(Match("cls", map="random"))
    found = drawn.layer_weights(*features(drawn, "cls", cls), {})
    assert found.shape == (2, 5)
    assert [(i + 1, j + 1) for i, j in found.nonzero().tolist()] == drawn.pairs()


def test_groups_name_all_their_pairs():
    term = bound(Match("cls", map="groups(regular)", blend="combine"))
    assert term.pairs() == [(1, 1), (1, 2), (2, 3), (2, 4), (3, 5), (3, 6)]
    assert bound(Match("cls", map="groups", blend="attention")).layers.teacher == (1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"map": "groups"}, "blend says how"),
        ({"map": "uniform", "blend": "attention"}, "one needs the other"),
        ({"map": "groups", "blend": "attention", "align": "both"}, r"as they are.*none, linear or shared"),
        ({"map": "groups", "blend": "attend"}, 'Did you mean "attention"'),
        ({"map": "groups(half)", "blend": "attention"}, "kind=half does not fit"),
        ({"map": "groups(last=false)", "blend": "attention", "student": (1, 8, 2, 3)}, "compares no layer"),
    ],
)
def test_blends_that_cannot_be(options, said):
    shapes = {"student": options.pop("student")} if "student" in options else {}
    with pytest.raises(LimbeckError, match=said):
        bound(Match("cls", **options), **shapes)


def test_attention_maps_are_not_blended():
    with pytest.raises(LimbeckError, match="compares positions"):
        bound(Match("attention", map="groups", blend="attention", distance="kl"))


def test_objectives_say_why_they_cannot_be_captured():
    assert Match("cls", map="uniform").uncapturable is None
    assert "CPU" in EarthMover({"hidden": "mse"}).uncapturable


def test_no_teacher():
    with pytest.raises(LimbeckError, match="needs a teacher"):
        EarthMover({"hidden": "mse"}).bind(Models(models().student, None), {})
