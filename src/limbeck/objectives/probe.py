"""Probe: heads on layers of frozen models learn the task."""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from limbeck.architectures import Shape
from limbeck.errors import LimbeckError
from limbeck.objectives.base import Models, NamedAligner, Read
from limbeck.objectives.heads import Headed
from limbeck.objectives.predictions import from_labels, labels_of
from limbeck.spec import Call
from limbeck.taps import Features


class Probe(Headed):
    """The heads of `filters(…)` against the labels, on layers of both models, or `of` the teacher's alone.

    The filters and heads of a student made of the teacher's layers are not taught: when the stage is over, they become
    copies of the teacher's. That the models stay as they are is for the stage to say, by its `train` list.
    """

    learns_labels = True

    def __init__(
        self,
        probe: str | Call,
        *,
        map: str | Call | None = None,
        align: str | Call = "filters",
        of: Literal["both", "teacher"] = "both",
        reduce: Literal["sum_layers", "mean_layers"] = "sum_layers",
        weight: float | str = 1.0,
    ) -> None:
        super().__init__(probe, map=map, align=align, reduce=reduce, weight=weight)
        if of not in ("both", "teacher"):
            raise LimbeckError(f'a probe is not of "{of}". Allowed: both, teacher.')
        self.of = of

    def bind(self, models: Models, named: Mapping[str, NamedAligner]) -> None:
        super().bind(models, named)
        self.copies = self.of == "both" and self.filters.alike
        self.teaches_student = self.of == "both" and not self.copies
        if self.copies:
            note = "the student is made of these layers of the teacher, and takes their filters when the stage is over"
            self.layers = self.layers._replace(note="; ".join(filter(None, (self.layers.note, note))))

    def _settle_blend(self, teacher: Shape) -> None:
        """Layers are read, not compared: there is nothing to blend."""

    def reads(self) -> set[Read]:
        return {read for read in super().reads() if read.model == "teacher" or self.teaches_student}

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        labels = labels_of(self.kind, batch)
        losses = self._side("teacher", teacher, labels)
        return losses + self._side("student", student, labels) if self.teaches_student else losses

    def _side(self, side: Literal["student", "teacher"], features: Features, labels: Tensor) -> Tensor:
        found = self.predicted(side, features)
        return self.reduced([from_labels(self.kind, logits, labels) for logits in found])

    def finish(self) -> None:
        if self.copies:
            self.filters.copy_to_student()
