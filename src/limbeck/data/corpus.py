"""What loaded data is: splits of texts and labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from limbeck.data.tasks import Task


@dataclass(frozen=True)
class Split:
    """The examples of one split; `labels`, by the kind of task, are int64 places in `Task.labels`, float32 scores or an
    array an example, or None if unlabelled."""

    name: str
    text: list[str]
    text_pair: list[str] | None
    labels: np.ndarray | None

    def __len__(self) -> int:
        return len(self.text)

    @property
    def joined(self) -> list[str]:
        """Both texts of every example as one, by which equal examples are known."""
        pairs = self.text_pair or [""] * len(self)
        return [f"{text}\t{pair}" for text, pair in zip(self.text, pairs, strict=True)]

    def at(self, places: np.ndarray) -> "Split":
        """The examples at these places."""
        return Split(
            self.name,
            [self.text[place] for place in places],
            [self.text_pair[place] for place in places] if self.text_pair is not None else None,
            self.labels[places] if self.labels is not None else None,
        )


@dataclass(frozen=True)
class RunningText:
    """Texts without labels or examples of their own, read when they are packed; see packing.py.

    `held` takes the last hundredth of the blocks (True) or all but it (False).
    """

    name: str
    files: tuple[Path, ...]
    column: str  # of the texts, in JSONL and Parquet
    held: bool | None = None


@dataclass(frozen=True)
class Corpus:
    """A task's splits. The first of `evals` is the one selections are made on; `notes` tell the user what was done."""

    task: Task
    train: Split | RunningText | None
    evals: Mapping[str, Split | RunningText]
    notes: tuple[str, ...] = ()
