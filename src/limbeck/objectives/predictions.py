"""Labels and Logits: what the student predicts, against what is right and what the teacher predicts."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from limbeck import vocabulary
from limbeck.data.kinds import IGNORE, Kind
from limbeck.data.mixing import mix
from limbeck.distances import PREDICTIONS, logits_mse
from limbeck.errors import LimbeckError
from limbeck.features import LOGITS, Rows
from limbeck.objectives.base import Models, NamedAligner, Objective, Read, per_example
from limbeck.spec import Call, bind, parse
from limbeck.taps import Features
from limbeck.vocabulary import Predictor


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with the right label; 0 where there is none."""
    losses = F.cross_entropy(logits.flatten(0, -2), labels.long().flatten(), reduction="none", ignore_index=IGNORE)
    return losses.view_as(labels)


def squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    """The squared difference from the right score."""
    return (logits.squeeze(-1) - labels.to(logits.dtype)).square()


def labels_of(kind: Kind, batch: Mapping[str, Tensor]) -> Tensor:
    """The labels of a batch that must have some."""
    if (labels := kind.targets(batch)) is None:
        raise LimbeckError("labels are learnt, and the data have none. Give a file with labels.")
    return labels


def from_labels(kind: Kind, logits: Rows, labels: Tensor, loss: Callable[..., Tensor] = cross_entropy) -> Tensor:
    """A label loss, one number an example; on a regression task every one is the squared error."""
    if kind.regression:
        return squared_error(logits.values, labels)
    if isinstance(logits.values, Predictor):
        return per_example(vocabulary.cross_entropy(logits.values, labels), kind.counted(logits.mask, labels))
    values, valid = kind.distributions(logits.values, kind.counted(logits.mask, labels))
    return _reduced(loss(values, labels), valid)


def from_teacher(
    kind: Kind, student: Rows, teacher: Rows, labels: Tensor | None, distance: "partial[Tensor]"
) -> Tensor:
    """A distance of predictions, one number an example; on a regression task every one is the mean squared difference.
    Where words are predicted, a student may know only the first of the teacher's."""
    valid = kind.counted(student.mask, labels)
    if isinstance(student.values, Predictor) and isinstance(teacher.values, Predictor):
        return per_example(vocabulary.apart(distance, student.values, teacher.values, truncate=True), valid)
    ours, theirs = vocabulary.whole(student.values), vocabulary.whole(teacher.values).detach()
    if kind.regression or distance.func is logits_mse:
        return _reduced(logits_mse(ours, theirs), valid)
    (ours, valid), (theirs, _) = (kind.distributions(values, valid) for values in (ours, theirs))
    return _reduced(distance(ours, theirs), valid)


def _reduced(rows: Tensor, valid: Tensor) -> Tensor:
    """One number an example, of rows that may be so already."""
    return rows if rows.dim() == 1 else per_example(rows, valid)


LABELS = {"cross_entropy": cross_entropy}


class Labels(Objective):
    """The task's own loss: cross-entropy, the mean of several where an example has several labels; the squared error
    on a regression task.

    Where inputs are mixed, so are their labels; `inputs: plain` takes both as they are (MixKD has a term of each).
    """

    learns_labels = True

    def __init__(
        self,
        labels: str | Call = "cross_entropy",
        *,
        inputs: Literal["mixed", "plain"] = "mixed",
        weight: float | str = 1.0,
    ) -> None:
        super().__init__(weight)
        if inputs not in ("mixed", "plain"):
            raise LimbeckError(f'there are no inputs "{inputs}". Allowed: mixed, plain.')
        if inputs == "plain":
            self.sides = ("plain", "teacher")
        self.loss = bind(parse(labels), LABELS, "label loss")

    def bind(self, models: Models, named: Mapping[str, NamedAligner]) -> None:
        self.kind = models.kind

    def reads(self) -> set[Read]:
        return {Read(self.sides[0], "logits", LOGITS)}

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        logits, labels = student["logits", LOGITS], labels_of(self.kind, batch)
        if "partner" not in batch or self.sides[0] == "plain":
            return from_labels(self.kind, logits, labels, self.loss)
        if self.kind.regression:
            return from_labels(self.kind, logits, mix(labels.to(logits.values.dtype), batch))
        # Cross-entropy with a mixed label is the mix of two.
        one, other = (from_labels(self.kind, logits, y, self.loss) for y in (labels, labels[batch["partner"]]))
        return batch["share"] * one + (1 - batch["share"]) * other


class Logits(Objective):
    """The teacher's predictions; their squared difference on a regression task.

    Where tokens are predicted, those count that have a label, or with `tokens: all` every one that is no padding.
    """

    def __init__(
        self,
        logits: str | Call = "kl",
        *,
        tokens: Literal["labelled", "all"] = "labelled",
        weight: float | str = 1.0,
    ) -> None:
        super().__init__(weight)
        if tokens not in ("labelled", "all"):
            raise LimbeckError(f'there are no tokens "{tokens}" to compare predictions at. Allowed: labelled, all.')
        self.tokens = tokens
        self.distance = bind(parse(logits), PREDICTIONS, "prediction distance")

    def bind(self, models: Models, named: Mapping[str, NamedAligner]) -> None:
        self.kind = models.kind
        if models.teacher is not None:
            self._check_labels(models.student.labels, models.teacher.labels)

    def _check_labels(self, ours: int, theirs: int) -> None:
        if ours != theirs and not (self.kind.vocabulary and ours < theirs):
            what, give = ("words", "vocabulary") if self.kind.vocabulary else ("labels", "task")
            raise LimbeckError(
                f"the student predicts {ours} {what} and the teacher {theirs}: their predictions cannot be compared. "
                f"Give a teacher and a student of the same {give}."
            )

    def reads(self) -> set[Read]:
        return {Read("student", "logits", LOGITS), Read("teacher", "logits", LOGITS)}

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        ours, theirs = student["logits", LOGITS], teacher["logits", LOGITS]
        labels = None if self.tokens == "all" else self.kind.targets(batch)
        return from_teacher(self.kind, ours, theirs, labels, self.distance)
