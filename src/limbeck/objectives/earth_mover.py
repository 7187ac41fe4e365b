"""EarthMover: every student layer meets every teacher layer, as much as the cheapest transport between them says."""

from collections.abc import Mapping
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from limbeck.architectures import Shape
from limbeck.errors import LimbeckError
from limbeck.mappings import Layers
from limbeck.objectives.base import Models, Moment, NamedAligner, Objective, Read, over_processes, per_example
from limbeck.objectives.match import Match
from limbeck.spec import Call, bind, parse
from limbeck.taps import Features

# Of a mean: the least a layer's cost or weight is taken for, so that a perfect match keeps all weights finite.
LEAST = 1e-6


def inverse(cost: np.ndarray) -> np.ndarray:
    """In proportion to the inverse of a layer's cost for each unit of its weight."""
    return (1 / cost) / (1 / cost).sum()


def softmax(cost: np.ndarray, *, temperature: Annotated[float, Field(gt=0)] = 1.0) -> np.ndarray:
    """The softmax of all layers' cost over a layer's, at a temperature."""
    cheap = cost.sum() / cost
    share = np.exp((cheap - cheap.max()) / temperature)
    return share / share.sum()


UPDATES = {f.__name__: f for f in (inverse, softmax)}


class Grid(Match):
    """Every student layer against every teacher layer: `(batch, student layers, teacher layers)`."""

    def _settle_blend(self, teacher: Shape) -> None:
        self._check_teacher_side()  # all layers of a group are compared, and none is blended

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        left, right, mask = self.aligned(student, teacher)
        theirs = list(right)
        rows = [torch.stack([per_example(self.distance(a, b), mask) for b in theirs], -1) for a in left]
        return torch.stack(rows, 1)

    @property
    def _as_they_are(self) -> tuple[bool, bool]:
        return False, False  # every layer is compared many times, so it is turned into fp32 once


class EarthMover(Objective):
    """Layers matched many to many by the earth mover's distance (BERT-EMD).

    `earth_mover` maps features to distances. For each, the flow between the layers is solved on the batch's mean
    distances, and the loss is the distances weighted by the flow. How much a layer sends or takes is its weight: equal
    at first and shared by all features. After each solve `update` gives layers that are cheap to reach more weight;
    `restart` makes them equal again at each epoch.
    """

    compares_layers = moves_to_encoder = True
    uncapturable = "the flow between the layers is solved on the CPU at every step"
    sends: Tensor
    takes: Tensor
    epoch: Tensor

    def __init__(
        self,
        earth_mover: Mapping[str, str | Call],
        *,
        align: str | Call = "none",
        update: str | Call = "inverse",
        restart: bool = False,
        weight: float | str = 1.0,
    ) -> None:
        super().__init__(weight)
        if not isinstance(earth_mover, Mapping) or not earth_mover:
            raise LimbeckError("earth_mover maps features to distances: earth_mover: {hidden: mse, attention: kl}.")
        if not isinstance(restart, bool):
            raise LimbeckError(f"restart {restart} must be true or false.")
        self.align, self.restart = parse(align), restart
        self.update = bind(parse(update), UPDATES, "update")
        self.grids = nn.ModuleList(_grid(feature, distance, align) for feature, distance in earth_mover.items())

    def bind(self, models: Models, named: Mapping[str, NamedAligner]) -> None:
        _solver()  # a missing package is a fault to find before training
        for grid in self._grids:
            grid.bind(models, named)
        for name, layers in (("sends", self.layers.student), ("takes", self.layers.teacher)):
            self.register_buffer(name, torch.full((len(layers),), 1 / len(layers)))
        self.register_buffer("epoch", torch.tensor(0))

    @property
    def _grids(self) -> list[Grid]:
        return [grid for grid in self.grids if isinstance(grid, Grid)]

    @property
    def layers(self) -> Layers:
        """The layers that meet."""
        return self._grids[0].layers

    def at(self, moment: Moment) -> None:
        super().at(moment)
        if self.restart and moment.epoch != int(self.epoch):  # not merely another than before: a run may be resumed
            self.epoch.fill_(moment.epoch)
            for weights in (self.sends, self.takes):
                weights.fill_(1 / len(weights))

    def reads(self) -> set[Read]:
        return {read for grid in self._grids for read in grid.reads()}

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        grids = [grid(student, teacher, batch) for grid in self._grids]
        means = [_mean(grid.detach(), batch.get("weight")) for grid in grids]
        flows = [self._flow(mean) for mean in means]
        if self.training and means[0].any():  # a piece of nothing but fill costs nothing and says nothing
            self._move([flow * mean for flow, mean in zip(flows, means)])
        return torch.stack([(torch.from_numpy(f).to(g) * g).sum((1, 2)) for f, g in zip(flows, grids)]).sum(0)

    def layer_weights(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        grids = [grid(student, teacher, batch).detach() for grid in self._grids]
        flows = [self._flow(_mean(grid, batch.get("weight"))) for grid in grids]
        return torch.from_numpy(np.mean(flows, 0)).float()

    def _flow(self, distances: np.ndarray) -> np.ndarray:
        return _solver()(_whole(self.sends), _whole(self.takes), distances)

    def _move(self, costs: list[np.ndarray]) -> None:
        """Give layers that were cheap more weight: each feature's answer, averaged."""
        for weights, axis in ((self.sends, 1), (self.takes, 0)):
            answers = [self.update(_floored(cost.sum(axis) / _whole(weights))) for cost in costs]
            weights.copy_(torch.from_numpy(_floored(np.mean(answers, 0))))


def _grid(feature: str, distance: str | Call, align: str | Call) -> Grid:
    grid = Grid(feature, map="groups", distance=distance)
    if grid.feature.width is not None:
        grid.align = parse(align)
    return grid


def _floored(values: np.ndarray) -> np.ndarray:
    return np.maximum(values, LEAST * values.mean())


def _mean(grid: Tensor, weight: Tensor | None) -> np.ndarray:
    """The mean over the examples of all processes."""
    weight = torch.ones_like(grid[:, 0, 0]) if weight is None else weight.to(grid)
    total = over_processes((grid * weight[:, None, None]).sum(0))
    return (total / over_processes(weight.sum()).clamp_min(1)).double().cpu().numpy()


def _whole(weights: Tensor) -> np.ndarray:
    """In double precision, adding up to 1: what a solver asks for."""
    exact = weights.double().cpu().numpy()
    return exact / exact.sum()


def _solver():
    try:
        from ot import emd
    except ImportError as error:
        raise LimbeckError("earth_mover needs the package POT: pip install POT.") from error
    return emd
