"""Heads: what layers of the student predict, against what layers of the teacher predict."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from limbeck.blends import Attention
from limbeck.distances import PREDICTIONS
from limbeck.errors import LimbeckError
from limbeck.features import Rows
from limbeck.filters import Filters
from limbeck.objectives.base import Models, NamedAligner
from limbeck.objectives.match import Match
from limbeck.objectives.predictions import from_teacher
from limbeck.spec import Call, bind, parse
from limbeck.taps import Features


class Headed(Match):
    """A term that reads layers through the heads of `filters(…)`."""

    by_heads = True
    compares_layers = moves_to_encoder = False  # heads predict

    def bind(self, models: Models, named: Mapping[str, NamedAligner]) -> None:
        super().bind(models, named)
        self.kind = models.kind
        if not isinstance(self.aligner, Filters):
            raise LimbeckError(f"{self.call}: align: {self.align} has no heads to predict with. Use align: filters(…).")

    @property
    def filters(self) -> Filters:
        """The aligner, which `bind` saw to be filters."""
        return self.aligner  # type: ignore[return-value]

    def _check_teacher_side(self) -> None:
        """Predictions are blended, not layers: a side has a filter for each of its layers."""

    def predicted(self, side: Literal["student", "teacher"], features: Features) -> list[Rows]:
        """The predictions of a model's layers: a row an example, or a token where the task has it so."""
        rows = [features[str(self.call), layer] for layer in getattr(self.layers, side)]
        mask = rows[0].mask
        found = self.filters.predict(side, [one.values for one in rows], mask)
        if mask.dim() == 2 and not self.kind.per_token:
            mask = torch.ones_like(mask[:, 0])
        return [Rows(values, mask) for values in found]

    def reduced(self, losses: Sequence[Tensor]) -> Tensor:
        """The sum over layers, or the mean where the recipe asks for it."""
        stacked = torch.stack(list(losses))
        return stacked.mean(0) if self.mean else stacked.sum(0)


class Heads(Headed):
    """The predictions of the student's layers against those of the teacher's; squared differences on a regression task.

    Under `map: groups` a student layer learns from several of the teacher's at once, blended; `blend: attention` weighs
    each by how alike its prediction is (Universal-KD). The blend is a target, and gets no gradient.
    """

    def __init__(
        self,
        heads: str | Call,
        *,
        map: str | Call | None = None,
        blend: str | Call | None = None,
        align: str | Call = "filters",
        distance: str | Call = "kl",
        reduce: Literal["sum_layers", "mean_layers"] = "sum_layers",
        weight: float | str = 1.0,
    ) -> None:
        super().__init__(heads, map=map, blend=blend, align=align, reduce=reduce, weight=weight)
        self.distance = bind(parse(distance), PREDICTIONS, "prediction distance")

    def bind(self, models: Models, named: Mapping[str, NamedAligner]) -> None:
        super().bind(models, named)
        if self.blend and not isinstance(self.blend, Attention):
            raise LimbeckError(f"{self.call}: only layers are combined, not predictions. Use blend: attention.")
        if self.blend and models.kind.vocabulary:
            raise LimbeckError(f"{self.call}: predictions of words are not blended. Use a map that pairs layers.")

    def aligned(self, student: Features, teacher: Features) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """What both sides' layers predict."""
        ours = self.predicted("student", student)
        with torch.no_grad():
            theirs = self.predicted("teacher", teacher)
        return [one.values for one in ours], [one.values for one in theirs], ours[0].mask

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        ours, theirs, mask = self.aligned(student, teacher)
        with torch.no_grad():
            targets = self.blend(ours, theirs) if self.blend else theirs
        pairs = [(Rows(one, mask), Rows(target, mask)) for one, target in zip(ours, targets)]
        labels = self.kind.targets(batch)
        return self.reduced([from_teacher(self.kind, *pair, labels, self.distance) for pair in pairs])
