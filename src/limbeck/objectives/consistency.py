"""Consistency: what the student makes of mixed inputs, against the mix of what it makes of the plain ones."""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from limbeck.data.mixing import mix
from limbeck.errors import LimbeckError
from limbeck.features import Rows
from limbeck.objectives.base import Models, NamedAligner
from limbeck.objectives.match import Match
from limbeck.spec import Call
from limbeck.taps import Features


class Consistency(Match):
    """A match of the student with itself (CR-ILD): on mixed inputs against the mix on plain ones, which is a target and
    gets no gradient. Needs a stage with `mixup`.

    Beyond the end of a text the target is what the student makes of the padding there, as the mixed input is.
    """

    sides = ("student", "plain")

    def __init__(
        self,
        consistency: str | Call,
        *,
        map: str | Call | None = None,
        distance: str | Call = "mse",
        reduce: Literal["sum_layers", "mean_layers"] = "sum_layers",
        weight: float | str = 1.0,
    ) -> None:
        super().__init__(consistency, map=map, distance=distance, reduce=reduce, weight=weight)
        if self.feature.width is None and not self.feature.distribution:
            raise LimbeckError(
                f"consistency: {self.call} has nothing to mix where one text of a pair has ended. Use attention."
            )

    def bind(self, models: Models, named: Mapping[str, NamedAligner]) -> None:
        super().bind(models._replace(teacher=models.student), named)

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        sites = [(str(self.call), layer) for layer in self.layers.teacher]
        targets = {s: Rows(mix(teacher[s].values.detach(), batch), teacher[s].mask) for s in sites}
        return super().forward(student, targets, batch)
