"""Relations among an example's states, against plain loops; whole losses are in tests/golden."""

import pytest
import torch

from limbeck.errors import LimbeckError
from limbeck.objectives import Context, build
from limbeck.objectives.context import RELATIONS, word_angles
from tests.test_objectives import MASK, bound, draw, features, tokens

LAYERS, LENGTH = 3, MASK.shape[1]
OURS, THEIRS = draw(len(MASK), LAYERS, LENGTH, 5, seed=1), draw(len(MASK), LAYERS, LENGTH, 8, seed=2)


@pytest.mark.parametrize("window", [3, 5])
def test_angles_stay_within_their_window(window):
    found = word_angles(OURS, THEIRS, MASK, window=window)
    for i, size in enumerate(MASK.sum(1).tolist()):
        gaps = []
        for layer in range(LAYERS):
            for centre in range(size):
                near = [j for j in range(size) if abs(j - centre) <= window // 2]
                for j in near:
                    for k in near:
                        rays = [(x[i, layer, j], x[i, layer, k], x[i, layer, centre]) for x in (OURS, THEIRS)]
                        ours, theirs = (torch.cosine_similarity(a - c, b - c, dim=0, eps=1e-12) for a, b, c in rays)
                        gaps.append(float((ours - theirs) ** 2))
        assert float(found[i]) == pytest.approx(sum(gaps) / len(gaps), rel=1e-10)


@pytest.mark.parametrize("name", RELATIONS)
def test_padding_changes_nothing(name):
    padded = [torch.cat([x, 100 + draw(len(MASK), LAYERS, 2, x.shape[-1])], 2) for x in (OURS, THEIRS)]
    wider = torch.cat([MASK, torch.zeros(len(MASK), 2, dtype=torch.bool)], 1)
    torch.testing.assert_close(RELATIONS[name](*padded, wider), RELATIONS[name](OURS, THEIRS, MASK))


@pytest.mark.parametrize("name", RELATIONS)
def test_one_token_or_none_gives_a_number_and_a_gradient(name):
    mask = torch.zeros_like(MASK)
    mask[0, 0] = True
    ours = OURS.clone().requires_grad_()
    found = RELATIONS[name](ours, THEIRS, mask)
    (gradient,) = torch.autograd.grad(found.sum(), ours)
    assert found.isfinite().all()
    assert gradient.isfinite().all()
    assert found[1] == 0


@pytest.mark.parametrize("name", RELATIONS)
def test_equal_relations_cost_nothing_whatever_the_width(name):
    """A state turned and stretched relates as before."""
    turn = torch.linalg.qr(draw(8, 8, seed=3))[0][:, :5]
    torch.testing.assert_close(
        RELATIONS[name](OURS, 3 * OURS @ turn.T, MASK), torch.zeros(len(MASK), dtype=torch.float64), atol=1e-12, rtol=0
    )


def test_what_is_read():
    term = bound(Context("word_pairs", map="uniform(embeddings=true)"))
    assert {(r.model, r.layer) for r in term.reads()} == {
        *(("student", s) for s in (0, 1, 2, 3)),
        *(("teacher", t) for t in (0, 2, 4, 6)),
    }
    assert term(*features(term, "hidden", tokens), {}).shape == (3,)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"context": "word_pair", "map": "uniform"}, 'Did you mean "word_pairs"'),
        ({"context": "word_angles(window=1)", "map": "uniform"}, "window=1 does not fit"),
    ],
)
def test_faults(declared, said):
    with pytest.raises(LimbeckError, match=said):
        build(declared)


@pytest.mark.parametrize("map", ["last", "random", "groups"])
def test_maps_that_do_not_align_layers(map):
    with pytest.raises(LimbeckError, match="pairs two layers or more"):
        bound(Context("layer_pairs", map=map))
