"""The one module a stage trains: student, objectives and aligners behind one forward."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from limbeck import architectures
from limbeck.data import kinds
from limbeck.data.masking import Masking
from limbeck.data.mixing import Mixup
from limbeck.errors import LimbeckError
from limbeck.objectives import Models, Moment, NamedAligner, Objective, Read, check_inputs, check_name, word_for
from limbeck.taps import Features, Site, Tap, full_precision
from limbeck.teachers import Cached, Live


@dataclass
class Output:
    """The loss to minimise, and each part of it before weighting, by name: its mean, and one number an example. The
    means are made together, so a gradient of one of them walks all; `losses` are apart."""

    loss: Tensor
    parts: dict[str, Tensor]
    losses: dict[str, Tensor]


class Distiller(nn.Module):
    """Student, objectives and aligners as one module: a forward gives every part of the loss.

    `objectives` is a list, or a dict that names each part. The teacher is held but not registered: it is absent from
    parameters, state_dict, train mode and DDP. `at(epoch, step)` moves weights and draws; call it before each step
    where a weight ramps, a map draws, inputs are mixed (`mixup`) or words hidden (`masking`), and give `steps`, the
    length of the training, where a weight ramps. Contrast needs `train_labels`, the labels of all training examples.
    """

    def __init__(
        self,
        teacher: PreTrainedModel | None,
        student: PreTrainedModel,
        objectives: Sequence[Objective] | Mapping[str, Objective],
        *,
        aligners: Mapping[str, NamedAligner] | None = None,
        train_labels: Tensor | None = None,
        mixup: Mixup | None = None,
        masking: Masking | None = None,
        steps: int = 1,
        seed: int = 0,
        stage: int = 0,
    ) -> None:
        super().__init__()
        if architectures.droppers(student):
            raise LimbeckError(
                "the student leaves out layers at random while it trains, and those can be compared with nothing. Load "
                "it without: from_pretrained(…, encoder_layerdrop=0.0, decoder_layerdrop=0.0)."
            )
        self.student, self.mixup, self.masking = student, mixup, masking
        self.steps, self.seed, self.stage = steps, seed, stage
        named = dict(objectives) if isinstance(objectives, Mapping) else _named(objectives)
        for name in named:
            check_name(name)
        self.dropped = [name for name, objective in named.items() if objective.idle]
        self.objectives = nn.ModuleDict({n: o for n, o in named.items() if not o.idle})
        if not self.objectives:
            raise LimbeckError("there is nothing to minimise: no objective, or none with a weight other than 0.")
        models = Models(
            architectures.shape(student),
            architectures.shape(teacher) if teacher else None,
            kinds.of(student),
            (student, teacher) if teacher else None,
            train_labels,
        )
        for objective in self.terms.values():
            check_inputs(objective, mixup is not None)
            objective.bind(models, aligners or {})
        self.tap = Tap(student, self._sites("student"))
        self.plain = Tap(student, self._sites("plain"))
        self.learns_plain = any(term.sides[0] == "plain" for term in self.terms.values())
        wanted = self._sites("teacher")
        if wanted and teacher is None:
            raise LimbeckError("the objectives read a teacher, and there is none. Give --teacher.")
        # In a list, so that nn.Module does not register it.
        self._teacher: list[Live | Cached] = [Live(teacher, wanted)] if teacher is not None and wanted else []
        self.at(0, 0)

    @property
    def terms(self) -> dict[str, Objective]:
        """The objectives, by name."""
        return {name: o for name, o in self.objectives.items() if isinstance(o, Objective)}

    @property
    def teacher(self) -> Live | Cached | None:
        """What answers for the teacher; None where no objective reads it."""
        return self._teacher[0] if self._teacher else None

    @teacher.setter
    def teacher(self, teacher: Live | Cached) -> None:
        """Have another answer for it."""
        self._teacher = [teacher]

    def _apply(self, fn: Any, recurse: bool = True) -> "Distiller":
        """Move the teacher too when the module is moved, though it is not registered; not one that only looks up."""
        for teacher in self._teacher:
            if teacher.live is not None:
                teacher.live.model._apply(fn)
        return super()._apply(fn, recurse)

    def reads(self) -> set[Read]:
        """Every site some objective reads."""
        return {read for objective in self.terms.values() for read in objective.reads()}

    def _sites(self, model: str) -> list[Site]:
        return [Site(read.feature, read.layer) for read in self.reads() if read.model == model]

    @property
    def steady(self) -> bool:
        """Whether the teacher answers alike whenever it is asked about an example, so that answers can be kept."""
        return self.mixup is None and self.masking is None

    def at(self, epoch: int, step: int) -> None:
        """Set weights and draws for a step of the training."""
        moment = Moment(self.seed, self.stage, epoch, step / max(self.steps, 1), step)
        for draws in (self.mixup, self.masking):
            if draws:
                draws.at(self.seed, self.stage, step)
        for objective in self.terms.values():
            objective.at(moment)

    def finish(self) -> None:
        """Do what the objectives leave for the end of the training."""
        for objective in self.terms.values():
            objective.finish()

    def forward(self, teacher_features: Features | None = None, **batch: Any) -> Output:
        """Every part of the loss, and their weighted sum.

        `batch` holds the token columns and `labels`. `weight` (0 leaves an example out) and `count` (the number of
        examples of the whole optimiser batch, where this is a piece of it) are optional.
        """
        mixed, features = self._sides(batch, teacher_features)
        weight = batch.get("weight")
        with full_precision(batch["input_ids"]):
            losses = {n: term(*(features[side] for side in term.sides), mixed) for n, term in self.terms.items()}
            parts = _means(torch.stack(list(losses.values())), weight, batch.get("count"))
            loss = (torch.stack([term.scale for term in self.terms.values()]) * parts).sum()
        return Output(loss, dict(zip(self.terms, parts)), losses)

    @torch.no_grad()
    def layer_weights(self, **batch: Any) -> dict[str, Tensor]:
        """On a batch, of every objective that compares layers: how much each of the student's (rows, its
        `layers.student`) meets each of the teacher's (columns, its `layers.teacher`)."""
        mixed, features = self._sides(batch)
        found: dict[str, Tensor] = {}
        with full_precision(batch["input_ids"]):
            for name, term in self.terms.items():
                one, other = (features[side] for side in term.sides)
                weights = term.layer_weights(one, other, mixed)
                found |= {} if weights is None else {name: weights}
        return found

    def _sides(
        self, batch: Mapping[str, Any], teacher: Features | None = None
    ) -> tuple[Mapping[str, Any], dict[str, Features]]:
        """The batch with words hidden and examples mixed, and what every side says of it, or of the plain examples."""
        batch = self.masking(batch) if self.masking else batch
        mixed = self.mixup(batch) if self.mixup else batch
        if teacher is None:
            teacher = self.teacher.features(**mixed) if self.teacher else {}
        student = self.tap(**mixed) if self.tap.sites else {}
        features = {"teacher": teacher, "student": student, "plain": self._plain(batch)}
        if self.teacher:
            self.teacher.join()
        return mixed, features

    def _plain(self, batch: Mapping[str, Any]) -> Features:
        """The student on the inputs as they are, where they are mixed and somebody reads both."""
        if not self.plain.sites:
            return {}
        # After the mixed inputs: autocast keeps the weights it casts, and those cast here first would have no gradient.
        with nullcontext() if self.learns_plain else torch.no_grad():
            return self.plain(**batch)


def _named(objectives: Sequence[Objective]) -> dict[str, Objective]:
    """Name parts by their kind, numbered where a kind comes twice."""
    named: dict[str, Objective] = {}
    for objective in objectives:
        kind = word_for(objective)
        taken = sum(name.split("-")[0] == kind for name in named)
        named[f"{kind}-{taken + 1}" if taken else kind] = objective
    return named


def _means(losses: Tensor, weight: Tensor | None, count: Tensor | None) -> Tensor:
    """Of `(parts, examples)`, the means over the examples of the whole batch, of which this may be a piece."""
    if weight is not None:
        losses = losses * weight
    if count is None:
        count = weight.sum().clamp_min(1) if weight is not None else torch.tensor(losses.shape[1], device=losses.device)
    return losses.sum(1) / count
