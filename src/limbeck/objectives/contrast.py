"""Contrast: an example's student and teacher states against those of other examples, kept in memory banks."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limbeck.architectures import Side
from limbeck.data.draws import key_for, noise
from limbeck.data.plan import FILL
from limbeck.errors import LimbeckError
from limbeck.features import find_feature
from limbeck.mappings import MAPPINGS
from limbeck.objectives.base import (
    Models,
    Moment,
    NamedAligner,
    Objective,
    Read,
    from_processes,
    over_processes,
    positive,
    within,
)
from limbeck.spec import Call, bind, parse
from limbeck.taps import Features

SIDES = ("student", "teacher")


class Contrast(Objective):
    """An example's state in the student is told by its state in the teacher from those of other classes (CoDIR).

    All layers of a side are joined and mapped to a unit vector of `width` dimensions. Each side has a bank with a
    vector of every training example, which follows with `momentum`. A vector of one side is compared with its own entry
    in the other side's bank and with `negatives` entries of other classes, by noise-contrastive estimation at a
    `temperature`; the loss is the mean over both sides. On a regression task every other example may be a negative.
    """

    moves_to_encoder = True
    passing = ("student_bank", "teacher_bank", "totals")
    key: Tensor
    totals: Tensor

    def __init__(
        self,
        contrast: str | Call,
        *,
        map: str | Call,
        width: int = 128,
        negatives: int = 100,
        temperature: float = 0.07,
        momentum: float = 0.5,
        weight: float | str = 1.0,
    ) -> None:
        super().__init__(weight)
        self.call = parse(contrast)
        self.feature = find_feature(self.call)
        self.side: Side = self.feature.side
        if self.feature.rows != "example" or self.feature.fixed is not None:
            raise LimbeckError(
                f"contrast takes one state an example, and {self.call} gives something else: cls or mean."
            )
        self.mapping = bind(parse(map), MAPPINGS, "map")
        self.width, self.negatives = int(positive("width", width)), int(positive("negatives", negatives))
        self.temperature = positive("temperature", temperature)
        self.momentum = within("momentum", momentum, "from 0 to below 1", lambda found: 0 <= found < 1)

    def bind(self, models: Models, named: Mapping[str, NamedAligner]) -> None:
        if models.teacher is None:
            raise LimbeckError(f"contrast: {self.call} needs a teacher, and there is none. Give --teacher.")
        if models.train_labels is None:
            raise LimbeckError(
                "contrast keeps a vector of every training example and draws by their labels, and there are none. Give "
                "labelled data; in a loop of your own, Distiller(…, train_labels=…) and the batch column id."
            )
        self.layers = self.mapping(models.student.at(self.side).layers, models.teacher.at(self.side).layers)
        if self.layers.draw or not self.layers.student:
            raise LimbeckError(f"contrast: {self.call} needs a map that names layers, once and for all.")
        self.examples = len(models.train_labels)
        inside = {
            "student": models.student.width * len(self.layers.student),
            "teacher": models.teacher.width * len(self.layers.teacher),
        }
        self.maps = nn.ModuleDict({side: nn.Linear(inside[side], self.width) for side in SIDES})
        for side in SIDES:
            bank = F.normalize(torch.randn(self.examples, self.width), dim=-1)
            self.register_buffer(f"{side}_bank", F.pad(bank, (0, 0, 0, 1)))  # a last row, where fill is written
        self.register_buffer("totals", torch.zeros(len(SIDES)))
        self.register_buffer("key", torch.tensor(0), persistent=False)
        self._key_now = 0
        self._sort(torch.arange(self.examples) if models.kind.regression else models.train_labels)

    def _sort(self, labels: Tensor) -> None:
        """Put the examples in the order of their classes: whose start and size say where the others are."""
        _, classes, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
        if len(sizes) < 2:
            raise LimbeckError("contrast tells classes apart, and the training examples have one only.")
        starts = sizes.cumsum(0) - sizes
        self.register_buffer("order", classes.argsort(stable=True), persistent=False)
        self.register_buffer("start", starts[classes], persistent=False)
        self.register_buffer("size", sizes[classes], persistent=False)

    def at(self, moment: Moment) -> None:
        super().at(moment)
        # An example comes once an epoch, so that its draw is a function of the step too, however a batch is cut.
        key = key_for(moment.seed, moment.stage, moment.epoch)
        if key != self._key_now:
            self._key_now = key
            self.key.fill_(key)

    def reads(self) -> set[Read]:
        name = str(self.call)
        return {Read("student", name, s) for s in self.layers.student} | {
            Read("teacher", name, t) for t in self.layers.teacher
        }

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        if "id" not in batch:
            raise LimbeckError("contrast needs the batch column id: the place of each example in the training data.")
        ids, weight = batch["id"], batch.get("weight")
        weight = torch.ones_like(ids, dtype=torch.float) if weight is None else weight
        ours = self._vectors("student", [student[str(self.call), s].values for s in self.layers.student])
        theirs = self._vectors("teacher", [teacher[str(self.call), t].values for t in self.layers.teacher])
        known = ids.clamp_min(0)
        met = torch.cat([known.unsqueeze(1), self.others(known)], 1)
        loss = self._estimate(0, ours, self._bank("teacher")[met], weight)
        loss = loss + self._estimate(1, theirs, self._bank("student")[met], weight)
        if self.training:
            rows = from_processes(torch.where(ids == FILL, self.examples, ids))
            for side, vectors in zip(SIDES, (ours, theirs)):
                self._remember(self._bank(side), rows, from_processes(vectors.detach()))
        return loss / len(SIDES)

    def _bank(self, side: str) -> Tensor:
        return self.get_buffer(f"{side}_bank")

    def _vectors(self, side: str, states: list[Tensor]) -> Tensor:
        return F.normalize(self.maps[side](torch.cat(states, -1)), dim=-1)

    def others(self, ids: Tensor) -> Tensor:
        """The negatives of these examples: ids of other classes, `(batch, negatives)`, drawn with replacement."""
        order, start, size = (self.get_buffer(name) for name in ("order", "start", "size"))
        start, size = start[ids].unsqueeze(1), size[ids].unsqueeze(1)
        draws = torch.arange(self.negatives, device=ids.device)
        place = noise(self.key + ids.unsqueeze(1) * self.negatives + draws) % (self.examples - size)
        return order[place + torch.where(place < start, 0, size)]

    def _estimate(self, side: int, vectors: Tensor, bank: Tensor, weight: Tensor) -> Tensor:
        """−log h of the example's own entry, which comes first, −log(1 − h) of the others; h = p / (p + K/n)."""
        products = torch.einsum("bkd,bd->bk", bank, vectors)
        scores = (products / self.temperature).exp()
        p, noise = scores / self._total(side, scores.detach(), weight), self.negatives / self.examples
        return torch.log1p(noise / p[:, 0]) + torch.log1p(p[:, 1:] / noise).sum(1)

    def _total(self, side: int, scores: Tensor, weight: Tensor) -> Tensor:
        """What makes scores probabilities: the number of examples times the mean score of the first batch."""
        counted = over_processes((scores.mean(1) * weight).sum()) / over_processes(weight.sum()).clamp_min(1)
        total = torch.where(self.totals[side] > 0, self.totals[side], self.examples * counted)
        if self.training:
            self.totals[side].copy_(total)
        return torch.where(total > 0, total, 1.0)  # of a piece of nothing but fill

    def _remember(self, bank: Tensor, rows: Tensor, vectors: Tensor) -> None:
        moved = self.momentum * bank[rows] + (1 - self.momentum) * vectors
        bank.index_copy_(0, rows, F.normalize(moved, dim=-1))
        bank[-1].zero_()
