"""MixUp: who is mixed with whom and how much; both change in place, and no filling row reaches an example."""

import numpy as np
import pytest
import torch

from limbeck.data.mixing import Mixup, mix
from limbeck.errors import LimbeckError


def batch(*sizes, weight=None):
    mask = (torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]).long()
    given = {"input_ids": mask, "attention_mask": mask}
    return given if weight is None else {**given, "weight": torch.tensor(weight, dtype=torch.float32)}


def drawn(mixup, step, seed=0, stage=0):
    mixup.at(seed, stage, step)
    return mixup.share.item(), mixup(batch(*[3] * 6))["partner"].tolist()


def test_a_draw_is_a_function_of_seed_stage_and_step():
    mixup, other = Mixup("beta(1.0)", rows=6), Mixup("beta(1.0)", rows=6)
    draws = [drawn(mixup, step) for step in range(20)]
    assert draws == [drawn(other, step) for step in range(20)]
    assert len({share for share, _ in draws}) == 20
    assert len({tuple(partner) for _, partner in draws}) > 10
    assert all(sorted(partner) == list(range(6)) for _, partner in draws)
    assert drawn(mixup, 3, seed=1) != drawn(mixup, 3) != drawn(mixup, 3, stage=1)


def test_shares_follow_the_beta_distribution():
    def shares(call):
        mixup = Mixup(call, rows=1)
        return np.array([(mixup.at(0, 0, step), mixup.share.item())[1] for step in range(2000)])

    for alpha in (0.5, 1.0, 3.0):
        found = shares(f"beta({alpha})")
        assert found.mean() == pytest.approx(0.5, abs=0.03)
        assert found.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.1)
    folded = shares("beta(1.0, fold=true)")
    assert folded.min() >= 0.5
    assert folded.mean() == pytest.approx(0.75, abs=0.02)


def test_draws_change_in_place():
    """A captured step reads the buffers it was captured with."""
    mixup = Mixup("beta", rows=6)
    before = mixup.share.data_ptr(), mixup.keys.data_ptr()
    first, second = drawn(mixup, 0), drawn(mixup, 1)
    assert first != second
    assert (mixup.share.data_ptr(), mixup.keys.data_ptr()) == before
    assert mixup(batch(3, 3))["share"] is mixup.share


@pytest.mark.parametrize("call", ["beta", "beta(partner=reversed)"])
@pytest.mark.parametrize("weight", [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 1, 0, 1, 1], [1, 1, 1, 1, 1]])
def test_no_example_is_mixed_with_a_row_that_fills(call, weight):
    mixup = Mixup(call, rows=8)
    real = [row for row, w in enumerate(weight) if w]
    for step in range(10):
        mixup.at(0, 0, step)
        partner = mixup(batch(2, 2, 2, 2, 2, weight=weight))["partner"].tolist()
        assert sorted(partner[row] for row in real) == real
        if "reversed" in call:
            assert [partner[row] for row in real] == real[::-1]


def test_the_mask_is_the_union():
    mixup = Mixup("beta(partner=reversed)", rows=3)
    mixup.at(0, 0, 0)
    mixed = mixup(batch(2, 3, 4))
    assert mixed["attention_mask"].sum(1).tolist() == [4, 3, 4]
    assert batch(2, 3, 4)["attention_mask"].sum(1).tolist() == [2, 3, 4]


def test_mix_is_a_loop_over_rows():
    given = {"share": torch.tensor(0.3), "partner": torch.tensor([2, 0, 1])}
    values = torch.randn(3, 4, 5)
    for i, j in enumerate([2, 0, 1]):
        torch.testing.assert_close(mix(values, given)[i], 0.3 * values[i] + 0.7 * values[j])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("gamma(1.0)", 'no mixup "gamma"'),
        ("beta(0)", "alpha=0 does not fit"),
        ("beta(1.0, partner=sorted)", "partner=sorted does not fit"),
    ],
)
def test_faults(call, said):
    with pytest.raises(LimbeckError, match=said):
        Mixup(call, rows=2)


def test_more_rows_than_it_was_made_for():
    with pytest.raises(LimbeckError, match="a batch has 3 rows and mixup is made for 2"):
        Mixup("beta", rows=2)(batch(1, 1, 1))
