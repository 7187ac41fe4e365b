import math

import pytest

from limbeck.engine.loop import total_steps
from limbeck.engine.schedule import lr_factor, steps_of
from limbeck.recipe import Stage


@pytest.mark.parametrize(
    ("schedule", "decay"),
    [("constant", [1, 1, 1, 1]), ("linear", [1, 3 / 4, 2 / 4, 1 / 4]), ("cosine", [1, None, 0.5, None])],
)
def test_a_warm_up_then_the_decay(schedule, decay):
    """No step is taken at a rate of 0, and the peak comes once the warm-up is over."""
    found = [lr_factor(step, 6, 2 / 6, schedule) for step in range(6)]
    assert found[:2] == pytest.approx([1 / 3, 2 / 3])
    for factor, expected in zip(found[2:], decay):
        assert expected is None or factor == pytest.approx(expected)
    assert min(found) > 0


def test_shares_of_steps_are_not_those_of_rounded_floats():
    assert math.ceil(0.07 * 100) == 8
    assert steps_of(0.07, 100) == 7
    assert steps_of(0.071, 100) == 8
    assert steps_of(0.0, 100) == 0


@pytest.mark.parametrize(("epochs", "steps"), [(1.1, 110), (0.001, 1), (1 / 3, 34), (2, 200)])
def test_epochs_may_be_fractions(epochs, steps):
    assert total_steps(Stage("distil", {}, epochs=epochs, batch=32), 3199) == steps
