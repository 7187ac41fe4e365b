"""Heads: what layers of the student predict, against what layers of the teacher predict."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from limbeck.distances import PREDICTIONS, logits_mse
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

    def bind(self, models: Models, named: Mapping[str, NamedAligner]) -> None:
        super().bind(models, named)
        self.kind = models.kind
        if not isinstance(self.aligner, Filters):
            raise LimbeckError(f"{self.call}: align: {self.align} has no heads to predict with. Use align: filters(…).")

    @property
    def filters(self) -> Filters:
        """The aligner, which `bind` saw to be filters."""
        return self.aligner  # type: ignore[return-value]

    def pairs(self) -> list[tuple[int, int]]:
        """Every pair of layers under `map: attention`."""
        if self.layers.attend:
            return [(s, t) for s in self.layers.student for t in self.layers.teacher]
        return super().pairs()

    def predicted(self, side: Literal["student", "teacher"], features: Features) -> list[Rows]:
        """The predictions of a model's layers: a row an example, or a token where the task has labels of tokens."""
        rows = [features[str(self.call), layer] for layer in getattr(self.layers, side)]
        mask = rows[0].mask
        found = getattr(self.filters, side).predict([one.values for one in rows], mask)
        if mask.dim() == 2 and not self.kind.per_token:
            mask = torch.ones_like(mask[:, 0])
        return [Rows(values, mask) for values in found]

    def reduced(self, losses: Sequence[Tensor]) -> Tensor:
        """The sum over layers, or the mean where the recipe asks for it."""
        stacked = torch.stack(list(losses))
        return stacked.mean(0) if self.mean else stacked.sum(0)


class Heads(Headed):
    """The predictions of the student's layers against those of the teacher's; squared differences on a regression task.

    Under `map: attention` a student layer learns from all the teacher's at once, each weighed by how alike its
    prediction is (Universal-KD).
    """

    def __init__(
        self,
        heads: str | Call,
        *,
        map: str | Call | None = None,
        align: str | Call = "filters",
        distance: str | Call = "kl",
        reduce: Literal["sum_layers", "mean_layers"] = "sum_layers",
        weight: float | str = 1.0,
    ) -> None:
        super().__init__(heads, map=map, align=align, reduce=reduce, weight=weight)
        self.distance = bind(parse(distance), PREDICTIONS, "prediction distance")

    def bind(self, models: Models, named: Mapping[str, NamedAligner]) -> None:
        super().bind(models, named)
        if models.regression:
            self.distance = logits_mse

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        ours = self.predicted("student", student)
        with torch.no_grad():
            theirs = self.predicted("teacher", teacher)
        targets = (
            [Rows(attended(one.values, [t.values for t in theirs]), one.mask) for one in ours]
            if self.layers.attend
            else theirs
        )
        labels = batch.get("labels")
        return self.reduced([from_teacher(self.distance, self.kind, o, t, labels) for o, t in zip(ours, targets)])


def attended(query: Tensor, teacher: Sequence[Tensor]) -> Tensor:
    """The teacher's predictions, mixed by the softmax of their dot products with the student's; no gradient."""
    outputs = torch.stack(list(teacher), -2)
    weights = torch.einsum("...d,...kd->...k", query.detach(), outputs).softmax(-1)
    return torch.einsum("...k,...kd->...d", weights, outputs)
