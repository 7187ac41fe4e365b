"""Which examples make up which optimiser batch, and which rank and micro-batch sees them."""

from typing import NamedTuple

import numpy as np

from limbeck.data.draws import PLAN

# Few distinct lengths mean few distinct shapes, each captured and compiled once: powers of two, and halfway between.
BUCKETS = (16, *(part * 2**power for power in range(4, 16) for part in (2, 3)), 2**17)

FILL = -1

Length = int | tuple[int, ...]  # of all rows of a batch; of its texts and of its targets, where it has targets


class PlannedBatch(NamedTuple):
    """A whole optimiser batch, over all ranks: example ids (FILL where there are too few), and the padded length."""

    ids: np.ndarray
    length: Length


def bucket(length: int, longest: int) -> int:
    """The smallest bucket that holds `length`, and never more than `longest`."""
    if length > longest:
        raise ValueError(f"an example of {length} tokens does not fit in {longest}")
    return next((size for size in BUCKETS if length <= size < longest), longest)


def padded(lengths: np.ndarray, longest: int) -> Length:
    """The buckets that hold examples of these lengths; `(examples, 2)` where they have targets."""
    if lengths.ndim == 1:
        return bucket(int(lengths.max()), longest)
    return tuple(bucket(int(most), longest) for most in lengths.max(0))


def totals(lengths: np.ndarray) -> np.ndarray:
    """How many tokens examples of these lengths have, targets included."""
    return lengths if lengths.ndim == 1 else lengths.sum(1)


def steps_per_epoch(n: int, batch: int) -> int:
    """How many optimiser batches `n` examples make; the last may be short."""
    return -(-n // batch)


def plan(
    lengths: np.ndarray, batch: int, *, seed: int, stage: int, epoch: int, longest: int, window: int = 16
) -> list[PlannedBatch]:
    """One epoch's batches: every example exactly once, in an order that depends on seed, stage and epoch alone.

    Examples are shuffled, sorted by length inside windows of `window` batches so that little is padding, and the
    batches are shuffled again. The one short batch takes its examples before the sorting: after it, they would be the
    longest of their window every time.
    """
    lengths = np.asarray(lengths)
    rng = np.random.default_rng([seed, stage, epoch, PLAN])
    order = rng.permutation(len(lengths))
    full, rest = np.split(order, [len(order) - len(order) % batch])
    windows = np.arange(len(full)) // (batch * window)
    rows = list(full[np.lexsort((totals(lengths)[full], windows))].reshape(-1, batch))
    if len(rest):
        rows.append(_filled(rest, batch))
    shapes = [padded(lengths[row[row != FILL]], longest) for row in rows]
    return [PlannedBatch(rows[at], shapes[at]) for at in rng.permutation(len(rows))]


def share(ids: np.ndarray, rank: int, world: int, pieces: int) -> list[np.ndarray]:
    """This rank's micro-batches of one optimiser batch: equal in size, and over all ranks each id exactly once.

    Ids are dealt out like cards, so that a short batch leaves no rank without a real example if it can be helped.
    """
    hands = world * pieces
    size = -(-len(ids) // hands)
    dealt = _filled(ids, size * hands).reshape(size, hands).T
    return [dealt[piece * world + rank] for piece in range(pieces)]


def padding_share(batches: list[PlannedBatch], lengths: np.ndarray) -> float:
    """The share of all planned token positions that hold no token of an example."""
    planned = sum(int(np.sum(batch.length)) * len(batch.ids) for batch in batches)
    return 1 - float(np.sum(lengths)) / planned


def _filled(ids: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([ids, np.full(size - len(ids), FILL, dtype=ids.dtype)])
