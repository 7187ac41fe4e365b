"""Consistency: what the student makes of mixed inputs, against the mix of what it makes of the plain ones."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from limbeck.aligners import Linear, NoAligner, Several, Shared
from limbeck.architectures import Shape
from limbeck.data.mixing import mix
from limbeck.errors import LimbeckError
from limbeck.features import Rows
from limbeck.objectives.base import Models, NamedAligner
from limbeck.objectives.match import Match
from limbeck.spec import Call
from limbeck.taps import Features


class Consistency(Match):
    """A match of the student with itself (CR-ILD): on mixed inputs against the mix on plain ones, which is a target and
    gets no gradient. Needs a stage with `mixup`. An aligner that maps the student, to the teacher's width, maps both.

    Beyond the end of a text the target is what the student makes of the padding there, as the mixed input is.
    """

    sides = ("student", "plain")

    def __init__(
        self,
        consistency: str | Call,
        *,
        map: str | Call | None = None,
        align: str | Call = "none",
        distance: str | Call = "mse",
        reduce: Literal["sum_layers", "mean_layers"] = "sum_layers",
        weight: float | str = 1.0,
    ) -> None:
        super().__init__(consistency, map=map, align=align, distance=distance, reduce=reduce, weight=weight)
        if self.feature.width is None and not self.feature.distribution:
            raise LimbeckError(
                f"consistency: {self.call} has nothing to mix where one text of a pair has ended. Use attention."
            )

    def bind(self, models: Models, named: Mapping[str, NamedAligner]) -> None:
        self._above = models.teacher or models.student
        super().bind(models._replace(teacher=models.student), named)

    def _settle_aligner(self, models: Models, teacher: Shape, named: Mapping[str, NamedAligner]) -> None:
        super()._settle_aligner(models, teacher if self.align.name == "none" else self._above.at(self.side), named)
        if not isinstance(self.aligner, NoAligner | Linear | Shared):
            raise LimbeckError(
                f"consistency: {self.call} compares the student with itself, and align: {self.align} maps a teacher "
                "too. Use align: none, linear or shared."
            )

    def aligned(self, student: Features, teacher: Features) -> tuple[Several, Several, Tensor]:
        """Both sides mapped as the student's is."""
        left, right, mask = super().aligned(student, teacher)
        with torch.no_grad():
            return left, self.aligner(right, right)[0], mask

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        sites = [(str(self.call), layer) for layer in self.layers.teacher]
        targets = {s: Rows(mix(teacher[s].values.detach(), batch), teacher[s].mask) for s in sites}
        return super().forward(student, targets, batch)
