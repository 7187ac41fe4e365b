"""The flow between layers, and how layer weights move and are kept. Values are in tests/golden."""

import builtins

import numpy as np
import pytest
import torch

from limbeck.errors import LimbeckError
from limbeck.features import Rows
from limbeck.objectives import EarthMover, Moment, build
from limbeck.objectives.earth_mover import inverse, softmax
from tests.test_objectives import bound, features, tokens

BATCH = {"weight": torch.tensor([1.0, 1.0, 0.0])}


def term(**options):
    found = bound(EarthMover({"hidden": "mse"}, **options)).train()
    return found, features(found, "hidden", tokens)


def test_fill_has_no_say_in_the_flow():
    (one, sides), (other, _) = term(), term()
    changed = {site: Rows(rows.values.clone(), rows.mask) for site, rows in sides[0].items()}
    for rows in changed.values():
        rows.values[2] = 100.0
    torch.testing.assert_close(one(*sides, BATCH)[:2], other(changed, sides[1], BATCH)[:2])
    assert torch.equal(one.sends, other.sends)


def test_the_order_of_the_examples_does_not_matter():
    (one, sides), (other, _) = term(), term()
    turned = [{site: type(rows)(rows.values.flip(0), rows.mask.flip(0)) for site, rows in s.items()} for s in sides]
    torch.testing.assert_close(one(*sides, {}), other(*turned, {}).flip(0))
    torch.testing.assert_close(one.takes, other.takes)


def test_weights_move_when_training_only_and_never_by_fill():
    found, sides = term()
    equal = found.sends.clone()
    found.eval()(*sides, {})
    found.train()(*sides, {"weight": torch.zeros(3)})
    assert torch.equal(found.sends, equal)
    found(*sides, {})
    assert not torch.equal(found.sends, equal)
    assert float(found.sends.sum()) == pytest.approx(1)
    assert float(found.takes.sum()) == pytest.approx(1)


def test_weights_start_afresh_each_epoch_if_told_and_outlive_a_resume():
    for restart in (False, True):
        found, sides = term(restart=restart)
        found.at(Moment(epoch=1))
        found(*sides, {})
        moved = found.takes.clone()
        again, _ = term(restart=restart)
        again.load_state_dict(found.state_dict())
        again.at(Moment(epoch=1, progress=0.5))
        assert torch.equal(again.takes, moved)
        again.at(Moment(epoch=2))
        assert torch.equal(again.takes, torch.full((6,), 1 / 6)) == restart


def test_a_perfect_match_leaves_weights_finite():
    found, (ours, theirs) = term()
    copied = {site: theirs["hidden", 2 * site[1]] for site in ours}
    for _ in range(5):
        assert found(copied, theirs, {}).isfinite().all()
    assert found.sends.min() > 0
    assert found.takes.min() > 0


def test_layer_weights_are_the_flow():
    found, sides = term()
    flow = found.layer_weights(*sides, {})
    torch.testing.assert_close(flow.sum(1), torch.full((3,), 1 / 3))
    torch.testing.assert_close(flow.sum(0), torch.full((6,), 1 / 6))
    assert found.layers.teacher == (1, 2, 3, 4, 5, 6)


def test_updates():
    cost = np.array([1.0, 2.0, 4.0])
    np.testing.assert_allclose(inverse(cost), np.array([4, 2, 1]) / 7)
    for t in (1.0, 3.0):
        e = np.exp(np.array([7, 3.5, 1.75]) / t)
        np.testing.assert_allclose(softmax(cost, temperature=t), e / e.sum())


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"earth_mover": "hidden"}, "maps features to distances"),
        ({"earth_mover": {}}, "maps features to distances"),
        ({"earth_mover": {"hiden": "mse"}}, 'Did you mean "hidden"'),
        ({"earth_mover": {"hidden": "kl"}}, "compares distributions"),
        ({"earth_mover": {"hidden": "mse"}, "update": "softmax(temperature=0)"}, "temperature=0 does not fit"),
        ({"earth_mover": {"hidden": "mse"}, "restart": "often"}, "restart often must be true or false"),
    ],
)
def test_faults(declared, said):
    with pytest.raises(LimbeckError, match=said):
        build(declared)


def test_an_aligner_of_pairs_is_refused():
    with pytest.raises(LimbeckError, match="none, linear or shared"):
        bound(EarthMover({"hidden": "mse"}, align="both"))


def test_without_pot_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def lacking(name, *rest, **named):
        if name == "ot":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(LimbeckError, match="pip install POT"):
        bound(EarthMover({"hidden": "mse"}))
