"""What loaded data is: splits of texts and labels."""

from dataclasses import dataclass

import numpy as np

from limbeck.data.tasks import Task


@dataclass(frozen=True)
class Split:
    """The examples of one split; `labels` are int64 places in `Task.labels`, float32 scores, or None if unlabelled."""

    name: str
    text: list[str]
    text_pair: list[str] | None
    labels: np.ndarray | None

    def __len__(self) -> int:
        return len(self.text)


@dataclass(frozen=True)
class Corpus:
    """A task's splits. The first of `evals` is the one selections are made on; `notes` tell the user what was done."""

    task: Task
    train: Split | None
    evals: dict[str, Split]
    notes: tuple[str, ...] = ()
