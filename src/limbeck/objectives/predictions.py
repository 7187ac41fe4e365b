"""Labels and Logits: what the student predicts, against what is right and what the teacher predicts."""

from collections.abc import Mapping
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from limbeck.data.mixing import mix
from limbeck.distances import PREDICTIONS, logits_mse
from limbeck.errors import LimbeckError
from limbeck.features import LOGITS
from limbeck.objectives.base import Models, NamedAligner, Objective, Read
from limbeck.spec import Call, bind, parse
from limbeck.taps import Features


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with the right label."""
    return F.cross_entropy(logits, labels.long(), reduction="none")


def squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    """The squared difference from the right score; what every label loss becomes on a regression task."""
    return (logits.squeeze(-1) - labels.to(logits.dtype)).square()


LABELS = {"cross_entropy": cross_entropy}


class Labels(Objective):
    """The task's own loss; the squared error on a regression task.

    Where inputs are mixed, so are their labels; `inputs: plain` takes both as they are (MixKD has a term of each).
    """

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
        if models.regression:
            self.loss = squared_error

    def reads(self) -> set[Read]:
        return {Read(self.sides[0], "logits", LOGITS)}

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        logits, labels = student["logits", LOGITS].values, batch["labels"]
        if "partner" not in batch or self.sides[0] == "plain":
            return self.loss(logits, labels)
        if self.loss is squared_error:
            return self.loss(logits, mix(labels.to(logits.dtype), batch))
        # Cross-entropy with a mixed label is the mix of two.
        return batch["share"] * self.loss(logits, labels) + (1 - batch["share"]) * self.loss(
            logits, labels[batch["partner"]]
        )


class Logits(Objective):
    """The teacher's predictions; their squared difference on a regression task."""

    def __init__(self, logits: str | Call = "kl", *, weight: float | str = 1.0) -> None:
        super().__init__(weight)
        self.distance = bind(parse(logits), PREDICTIONS, "prediction distance")

    def bind(self, models: Models, named: Mapping[str, NamedAligner]) -> None:
        if models.teacher is not None and models.teacher.labels != models.student.labels:
            raise LimbeckError(
                f"the student predicts {models.student.labels} labels and the teacher {models.teacher.labels}: "
                "their predictions cannot be compared. Give a teacher and a student of the same task."
            )
        if models.regression:
            self.distance = logits_mse

    def reads(self) -> set[Read]:
        return {Read("student", "logits", LOGITS), Read("teacher", "logits", LOGITS)}

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        return self.distance(student["logits", LOGITS].values, teacher["logits", LOGITS].values)
