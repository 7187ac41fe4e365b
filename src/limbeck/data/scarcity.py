"""Fewer examples, or wrong labels: what is trained on changes, what is scored on never does."""

from dataclasses import replace

import numpy as np

from limbeck.data.corpus import Corpus, Split
from limbeck.data.draws import FEW, LABEL_NOISE
from limbeck.data.spec import DataSpec
from limbeck.data.tasks import Task
from limbeck.errors import LimbeckError


def scarce(corpus: Corpus, spec: DataSpec, seed: int) -> Corpus:
    """The corpus with its train set as the user wants it: labels flipped first, then a few examples taken."""
    train, notes = corpus.train, list(corpus.notes)
    if isinstance(train, Split) and spec.label_noise is not None:
        train, said = flip_labels(train, corpus.task, spec.label_noise)
        notes.append(said)
    if isinstance(train, Split) and spec.few is not None:
        train, said = take_few(train, spec.few, seed)
        notes.append(said)
    return replace(corpus, train=train, notes=tuple(notes))


def flip_labels(train: Split, task: Task, rate: float) -> tuple[Split, str]:
    """Each label becomes another one with probability `rate`, all others equally likely; and a line that says so.

    The draw is the same in every run: a teacher and its students, whatever their seeds, meet the same wrong labels.
    """
    if not 0 < rate <= 1:
        raise LimbeckError(f"--label-noise {rate:g} must lie above 0 and up to 1: 0.3 flips three labels in ten.")
    if task.kind == "regression":
        raise LimbeckError(f"--label-noise flips labels, and {task.name} predicts a score. Leave it out.")
    if task.kind != "classification":
        raise LimbeckError(
            f"--label-noise flips the one label of an example, and {task.name} is a {task.kind} task. Leave it out."
        )
    if train.labels is None:
        raise LimbeckError("--label-noise flips labels, and the train file has none. Name them with --label COLUMN.")
    rng, count = np.random.default_rng(LABEL_NOISE), len(task.labels)
    flipped = rng.random(len(train)) < rate
    other = (train.labels + rng.integers(1, count, len(train))) % count
    said = f"train: {int(flipped.sum())} of {len(train)} labels flipped"
    return replace(train, labels=np.where(flipped, other, train.labels)), said


def take_few(train: Split, count: int, seed: int) -> tuple[Split, str]:
    """`count` examples drawn by the run's seed, all if there are no more; and a line that says so."""
    if count < 1:
        raise LimbeckError(f"--few {count} must be 1 or more.")
    if count >= len(train):
        return train, f"train: all {len(train)} examples, since --few {count} is not less"
    places = np.random.default_rng([seed, FEW]).permutation(len(train))[:count]
    return train.at(np.sort(places)), f"train: {count} of {len(train)} examples taken, by the seed"
