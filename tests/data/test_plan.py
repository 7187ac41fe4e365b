import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from limbeck.data.plan import BUCKETS, FILL, bucket, padding_share, plan, share, steps_per_epoch

lengths_lists = st.lists(st.integers(1, 128), min_size=1, max_size=300)


def planned(lengths, batch, *, seed=0, stage=0, epoch=0, **options):
    return plan(np.array(lengths), batch, seed=seed, stage=stage, epoch=epoch, longest=128, **options)


@given(lengths_lists, st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3))
def test_every_example_once_an_epoch_whatever_the_ranks(lengths, batch, world, pieces, window, epoch):
    batches = planned(lengths, batch, epoch=epoch, window=window)
    assert len(batches) == steps_per_epoch(len(lengths), batch)
    seen = []
    for whole in batches:
        parts = [part for rank in range(world) for part in share(whole.ids, rank, world, pieces)]
        assert len(parts) == world * pieces
        assert len({part.shape for part in parts}) == 1
        dealt = np.concatenate(parts)
        assert sorted(dealt[dealt != FILL]) == sorted(whole.ids[whole.ids != FILL])
        seen.extend(dealt[dealt != FILL])
    assert sorted(seen) == list(range(len(lengths)))


@given(lengths_lists, st.integers(1, 40))
def test_batches_have_one_size_and_fit_their_length(lengths, batch):
    lengths = np.array(lengths)
    batches = planned(lengths, batch)
    short = 0
    for ids, length in batches:
        real = ids[ids != FILL]
        assert len(ids) == batch
        assert len(real) >= 1
        assert lengths[real].max() <= length
        assert length in BUCKETS
        short += len(real) < batch
    assert short == (len(lengths) % batch > 0)


def test_long_examples_are_not_padded_to_all_a_model_can_take():
    assert bucket(9000, 10**18) == 12288  # T5 has no end of positions
    assert bucket(9000, 10000) == 10000


@given(st.integers(0, 2**31), st.integers(0, 9), st.integers(0, 99))
def test_the_order_depends_on_seed_stage_and_epoch_alone(seed, stage, epoch):
    lengths = np.arange(200) % 60 + 1

    def order(**changed):
        at = {"seed": seed, "stage": stage, "epoch": epoch} | changed
        return np.concatenate([ids for ids, _ in planned(lengths, 8, **at)]).tolist()

    first = order()
    np.random.seed(3)
    assert order() == first
    assert order(seed=seed + 1) != first
    assert order(stage=stage + 1) != first
    assert order(epoch=epoch + 1) != first


def test_sorting_in_windows_saves_padding():
    lengths = np.random.default_rng(0).integers(5, 120, size=2000)
    sorted_share = padding_share(planned(lengths, 32), lengths)
    assert sorted_share < 0.25
    assert sorted_share < padding_share(planned(lengths, 32, window=1), lengths) / 2


def test_batches_of_all_lengths_come_mixed():
    lengths = np.arange(1, 129).repeat(16)
    order = [length for _, length in planned(lengths, 16)]
    assert order != sorted(order)


def test_padding_share_counts_fill():
    batches = planned([16] * 6, 4)
    assert padding_share(batches, np.array([16] * 6)) == pytest.approx(1 - 6 / 8)


@pytest.mark.parametrize(
    ("length", "longest", "size"), [(1, 128, 16), (16, 128, 16), (17, 128, 32), (97, 128, 128), (50, 60, 60), (9, 9, 9)]
)
def test_bucket(length, longest, size):
    assert bucket(length, longest) == size


def test_an_example_beyond_the_longest_is_refused():
    with pytest.raises(ValueError, match="129 tokens does not fit in 128"):
        bucket(129, 128)


def test_a_short_batch_is_spread_over_the_ranks():
    ids = np.array([5, 6, 7, FILL, FILL, FILL, FILL, FILL])
    first = [share(ids, rank, 2, 2)[0].tolist() for rank in range(2)]
    assert first == [[5, FILL], [6, FILL]]
