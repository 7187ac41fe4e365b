"""Which layers meet. Layer 0 is the embedding output, layer k the output of block k.

A mapping is given the depths of student and teacher and answers which student layers are compared, and with which
teacher layers. Most pair them once and for all; `random` draws anew each epoch; `groups` gives a student layer several.
"""

import random as stdlib_random
from collections.abc import Callable
from itertools import pairwise
from typing import Literal, NamedTuple

from limbeck.errors import LimbeckError


class Layers(NamedTuple):
    """The layers that meet: `student[i]` with `teacher[i]`, with `teacher[draw(seed, stage, epoch)[i]]`, or with all of
    `groups[i]`, which a blend makes one."""

    student: tuple[int, ...]
    teacher: tuple[int, ...]
    draw: Callable[[int, int, int], list[int]] | None = None
    note: str = ""  # what a user should hear
    groups: tuple[tuple[int, ...], ...] = ()


def uniform(student: int, teacher: int, *, last: bool = True, embeddings: bool = False) -> Layers:
    """Every ⌊N/M⌋-th teacher layer, in order (PKD-Skip, ILD-RTC, TinyBERT)."""
    _no_deeper(student, teacher)
    stride, rest = divmod(teacher, student)
    over = f"uniform: {teacher} is no multiple of {student}, so layers above {student * stride} are left out"
    return _pairs([(m, m * stride) for m in _layers(student, last, embeddings)])._replace(
        note=over if last and rest else ""
    )


def first(student: int, teacher: int, *, last: bool = True, embeddings: bool = False) -> Layers:
    """The teacher's lowest layers: k meets k."""
    _no_deeper(student, teacher)
    return _pairs([(m, m) for m in _layers(student, last, embeddings)])


def top(student: int, teacher: int, *, last: bool = True) -> Layers:
    """The teacher's highest layers (PKD-Last)."""
    _no_deeper(student, teacher)
    return _pairs([(m, teacher - student + m) for m in _layers(student, last)])


def last(student: int, teacher: int) -> Layers:
    """Only the last layer of each."""
    return _pairs([(student, teacher)])


def sanh(student: int, teacher: int) -> Layers:
    """DistilBERT's layers, 1, 3, 5, 8, 10, 12 of 12, where the teacher is twice as deep; otherwise `uniform`."""
    if teacher != 2 * student:
        note = f"sanh is made for a teacher twice as deep, not {teacher} layers over {student}: uniform is used"
        even = uniform(student, teacher)
        return even._replace(note="; ".join(filter(None, [note, even.note])))
    return _pairs([(k, 2 * k - 1 if k <= student // 2 else 2 * k) for k in _layers(student)])


def pairs(student: int, teacher: int, *, layers: list[tuple[int, int]]) -> Layers:
    """Pairs given one by one: `pairs([[1, 4], [2, 8]])`, student first; 0 is the embeddings."""
    for s, t in layers:
        if not (0 <= s <= student and 0 <= t <= teacher):
            raise LimbeckError(
                f"layer pair [{s}, {t}] is out of range: the student has layers 0 to {student} (0 is the embeddings), "
                f"the teacher 0 to {teacher}."
            )
    return _pairs(layers)


def random(student: int, teacher: int, *, last: bool = False) -> Layers:
    """As many teacher layers as the student compares, drawn without replacement each epoch, in order (RAIL-KD)."""
    _no_deeper(student, teacher)
    met = tuple(_layers(student, last))
    drawn_from = tuple(_layers(teacher, last))

    def draw(seed: int, stage: int, epoch: int) -> list[int]:
        return sorted(stdlib_random.Random(f"{seed}/{stage}/{epoch}").sample(range(len(drawn_from)), len(met)))

    return Layers(met, drawn_from, draw)


def lowest(student: int, teacher: int) -> Layers:
    """The lowest of every ⌊N/M⌋ teacher layers: 1, 3, …, 11 of 12 (CoDIR)."""
    _no_deeper(student, teacher)
    stride = teacher // student
    return _pairs([(m, (m - 1) * stride + 1) for m in _layers(student)])


def groups(
    student: int,
    teacher: int,
    *,
    kind: Literal["all", "regular", "overlap", "skip", "cross"] = "all",
    last: bool = True,
    embeddings: bool = False,
) -> Layers:
    """Several teacher layers for each student layer: all of them, or a share.

    `regular` cuts the teacher's layers evenly, in order. `overlap` adds the next layer on either side of a share,
    `skip` leaves out a share's layer nearest the middle of the model, `cross` keeps every other layer of a share, from
    its first (ALP-KD, CKD).
    """
    _no_deeper(student, teacher)
    met, seen = _layers(student, last, embeddings), _layers(teacher, last, embeddings)
    cuts = [i * len(seen) // max(len(met), 1) for i in range(len(met) + 1)]
    shares = [tuple(_share(kind, seen, low, high)) for low, high in pairwise(cuts)]
    return Layers(tuple(met), tuple(sorted({t for share in shares for t in share})), groups=tuple(shares))


def _share(kind: str, layers: range, low: int, high: int) -> range:
    """The share `layers[low:high]`, as its kind has it."""
    if kind == "all":
        return layers
    if kind == "overlap":
        return layers[max(low - 1, 0) : high + 1]
    if kind == "cross":
        return layers[low:high:2]
    if kind == "skip" and high - low > 1:
        return layers[low : high - 1] if 2 * high <= len(layers) else layers[low + 1 : high]
    return layers[low:high]


MAPPINGS = {f.__name__: f for f in (uniform, first, top, last, sanh, pairs, random, lowest, groups)}


def _layers(depth: int, last: bool = True, embeddings: bool = False) -> range:
    return range(0 if embeddings else 1, depth + 1 if last else depth)


def _no_deeper(student: int, teacher: int) -> None:
    if student > teacher:
        raise LimbeckError(
            f"the student has {student} layers and the teacher {teacher}: this map needs a teacher at least as deep. "
            "Say which layers meet: pairs([[1, 2], …]), student first."
        )


def _pairs(layers: list[tuple[int, int]]) -> Layers:
    return Layers(tuple(s for s, _ in layers), tuple(t for _, t in layers))
