"""Labels, Logits, Match: the terms of a loss. Each says what it reads and returns one number an example.

An objective is declared by call strings (`Match("cls", map="uniform", distance="unit_mse", weight=100)`) and bound once
to the shapes of the two models, which settles its layers, widths and aligners.
"""

from collections.abc import Callable, Container, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from limbeck.aligners import ALIGNERS, NoAligner
from limbeck.architectures import Shape
from limbeck.distances import DISTANCES, OF_DISTRIBUTIONS, PREDICTIONS, logits_mse
from limbeck.errors import LimbeckError, did_you_mean
from limbeck.features import FEATURES, LOGITS
from limbeck.mappings import MAPPINGS, Layers
from limbeck.spec import Call, bind, number, options_of, parse
from limbeck.taps import Features


class Read(NamedTuple):
    """Somebody wants this feature of this layer of this model."""

    model: Literal["student", "teacher"]
    feature: str
    layer: int


class Moment(NamedTuple):
    """Where training stands: everything a schedule or a draw may depend on."""

    seed: int = 0
    stage: int = 0
    epoch: int = 0
    progress: float = 0.0  # share of the stage's steps done


class Models(NamedTuple):
    """The shapes an objective is bound to; `teacher` is None where there is none."""

    student: Shape
    teacher: Shape | None
    regression: bool = False


def ramp(progress: float, *, weight: float, over: Annotated[float, Field(gt=0)] = 1.0) -> float:
    """From 0 to `weight`, linearly over the first part `over` of the stage (CR-ILD)."""
    return weight * min(progress / over, 1.0)


WEIGHTS = {"ramp": ramp}


class Objective(nn.Module):
    """One term. Subclasses give `bind`, `reads` and a forward to one number an example."""

    scale: Tensor

    def __init__(self, weight: float | str) -> None:
        super().__init__()
        self.weight = str(weight)
        try:
            constant = number(weight)
            self.schedule: Callable[[float], float] = lambda progress: constant
        except ValueError:
            self.schedule = bind(parse(weight), WEIGHTS, "weight")
        self.register_buffer("scale", torch.tensor(0.0), persistent=False)
        self._weight_now = 0.0

    @property
    def idle(self) -> bool:
        """Whether the weight is 0 throughout."""
        return self.schedule(0.0) == 0 and self.schedule(1.0) == 0

    def at(self, moment: Moment) -> None:
        """Set what changes while training: weight, draw. In place, so that a captured step sees it."""
        weight = self.schedule(moment.progress)
        if weight != self._weight_now:  # nothing is sent to the device that is there already
            self._weight_now = weight
            self.scale.fill_(weight)

    def bind(self, models: Models, named: Mapping[str, "NamedAligner"]) -> None:
        """Settle everything that depends on the models."""

    def reads(self) -> set[Read]:
        """The sites the forward needs."""
        raise NotImplementedError

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        """One number an example."""
        raise NotImplementedError


class NamedAligner:
    """An aligner named at the top of a recipe: made when first used, kept across stages."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.make = bind(call, ALIGNERS, "aligner")
        self.module: nn.Module | None = None
        self.sizes: tuple[int, ...] = ()

    def __call__(self, student: int, teacher: int, pairs: int) -> nn.Module:
        sizes = (student, teacher) if self.call.name == "shared" else (student, teacher, pairs)
        module = self.module if self.module is not None else self.make(student, teacher, pairs)
        if self.module is not None and self.sizes != sizes:
            raise LimbeckError(
                f'aligner "{self.call}" is named by terms that differ in widths or in how many layers they compare: '
                f"{self.sizes} and {sizes}. Name one for each, or use shared, one map for any number of layers."
            )
        self.module, self.sizes = module, sizes
        return module


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with the right label."""
    return F.cross_entropy(logits, labels.long(), reduction="none")


LABELS = {"cross_entropy": cross_entropy}


class Labels(Objective):
    """The task's own loss; the squared error on a regression task."""

    def __init__(self, labels: str | Call = "cross_entropy", *, weight: float | str = 1.0) -> None:
        super().__init__(weight)
        self.loss = bind(parse(labels), LABELS, "label loss")
        self.regression = False

    def bind(self, models: Models, named: Mapping[str, NamedAligner]) -> None:
        self.regression = models.regression

    def reads(self) -> set[Read]:
        return {Read("student", "logits", LOGITS)}

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        logits = student["logits", LOGITS].values
        if self.regression:
            return (logits.squeeze(-1) - batch["labels"].float()).square()
        return self.loss(logits, batch["labels"])


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


class Match(Objective):
    """Layers of the student against layers of the teacher: feature × mapping × aligner × distance."""

    draw: Tensor

    def __init__(
        self,
        match: str | Call,
        *,
        map: str | Call | None = None,
        align: str | Call = "none",
        distance: str | Call = "mse",
        reduce: Literal["sum_layers", "mean_layers"] = "sum_layers",
        weight: float | str = 1.0,
    ) -> None:
        super().__init__(weight)
        self.call, self.align = parse(match), parse(align)
        feature = bind(self.call, FEATURES, "feature")
        self.feature, self.asked_heads = feature.func, feature.keywords.get("heads")
        if not hasattr(self.feature, "site"):
            raise LimbeckError(f'feature "{self.call.name}" does not say where it looks: mark it with @seen_at(…).')
        self.distance = bind(parse(distance), DISTANCES, "distance")
        if self.distance.func in OF_DISTRIBUTIONS and not self.feature.distribution:
            raise LimbeckError(
                f'distance "{parse(distance)}" compares distributions, and {self.call} gives vectors. '
                "Use mse, unit_mse, unit_sq or cosine; kl and soft_ce go with attention and the relations."
            )
        if reduce not in ("sum_layers", "mean_layers"):
            raise LimbeckError(f'there is no reduction "{reduce}". Allowed: sum_layers, mean_layers.')
        self.mean = reduce == "mean_layers"
        if self.feature.fixed is not None and map is not None:
            raise LimbeckError(f'feature "{self.call}" has one layer only: leave out map.')
        if self.feature.fixed is None and map is None:
            raise LimbeckError(f"match: {self.call} needs a map: which layers meet. Allowed: {', '.join(MAPPINGS)}.")
        self.mapping = bind(parse(map), MAPPINGS, "map") if map is not None else None

    def bind(self, models: Models, named: Mapping[str, NamedAligner]) -> None:
        if models.teacher is None:
            raise LimbeckError(f"match: {self.call} needs a teacher, and there is none. Give --teacher.")
        student, teacher = models.student, models.teacher
        self.layers = (
            self.mapping(student.layers, teacher.layers)
            if self.mapping
            else Layers((self.feature.fixed,), (self.feature.fixed,))
        )
        self._check_layers(student, teacher)
        start = self.layers.draw(0, 0, 0) if self.layers.draw else list(range(len(self.layers.student)))
        self.register_buffer("draw", torch.tensor(start), persistent=False)
        self._drawn_now = start
        self._settle_heads(student, teacher)
        count = len(self.layers.student)
        if self.feature.width is None:
            if self.align.name != "none":
                raise LimbeckError(f"match: {self.call} compares positions, not widths: leave out align.")
            self.aligner: nn.Module = NoAligner(1, 1, count)
            return
        widths = getattr(student, self.feature.width), getattr(teacher, self.feature.width)
        make = named.get(self.align.name) or bind(self.align, ALIGNERS, "aligner")
        self.aligner = make(*widths, count)
        if isinstance(self.aligner, NoAligner) and not self.aligner.fits:
            raise LimbeckError(
                f"match: {self.call} compares a student of width {widths[0]} with a teacher of width {widths[1]} as "
                "is. Add align: linear, which learns the map."
            )

    def _check_layers(self, student: Shape, teacher: Shape) -> None:
        lowest = 1 if self.feature.site == "attention" else LOGITS
        if not self.layers.student:
            raise LimbeckError(
                f"match: {self.call} compares no layer: the map leaves a student of {student.layers} layers none. "
                "Use more layers, or a map that keeps the last one (last=true)."
            )
        for s in self.layers.student:
            if not lowest <= s <= student.layers:
                raise LimbeckError(f"match: {self.call} asks for layer {s} of a student with {student.layers} layers.")
        for t in self.layers.teacher:
            if not lowest <= t <= teacher.layers:
                raise LimbeckError(f"match: {self.call} asks for layer {t} of a teacher with {teacher.layers} layers.")

    def _settle_heads(self, student: Shape, teacher: Shape) -> None:
        """Models with other head counts meet in the largest of the two counts that divides both widths."""
        if self.feature.site != "attention":
            return
        if heads := self.asked_heads:
            if student.width % heads or teacher.width % heads:
                raise LimbeckError(
                    f"match: {self.call}: {heads} heads do not divide both widths, {student.width} and {teacher.width}."
                )
            return
        if student.heads == teacher.heads:
            return
        fitting = [h for h in (student.heads, teacher.heads) if student.width % h == 0 == teacher.width % h]
        if not fitting:
            raise LimbeckError(
                f"match: {self.call}: neither {student.heads} nor {teacher.heads} heads divide both widths, "
                f"{student.width} and {teacher.width}. Say how many: {self.call.name}(heads=…)."
            )
        self.call = self.call.with_option("heads", max(fitting))

    def at(self, moment: Moment) -> None:
        super().at(moment)
        if self.layers.draw:
            drawn = self.layers.draw(moment.seed, moment.stage, moment.epoch)
            if drawn != self._drawn_now:
                self._drawn_now = drawn
                self.draw.copy_(torch.tensor(drawn))

    def pairs(self) -> list[tuple[int, int]]:
        """The layer pairs compared now, student first."""
        return [(s, self.layers.teacher[i]) for s, i in zip(self.layers.student, self.draw.tolist())]

    def reads(self) -> set[Read]:
        name = str(self.call)
        return {Read("student", name, s) for s in self.layers.student} | {
            Read("teacher", name, t) for t in self.layers.teacher
        }

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        name = str(self.call)
        ours = [student[name, s] for s in self.layers.student]
        theirs = [teacher[name, t].values for t in self.layers.teacher]
        if self.layers.draw:  # the drawn layers are picked on the device: one captured step serves every draw
            theirs = list(torch.stack(theirs).index_select(0, self.draw).unbind())
        left, right = self.aligner([rows.values for rows in ours], theirs)
        losses = [per_example(self.distance(a, b), ours[0].mask) for a, b in zip(left, right)]
        total = torch.stack(losses).sum(0)
        return total / len(losses) if self.mean else total


def per_example(distances: Tensor, mask: Tensor) -> Tensor:
    """The mean over each example's valid rows: `(batch, …)` → `(batch,)`. The one place where rows are reduced."""
    rows, valid = distances.reshape(len(distances), -1), mask.reshape(len(mask), -1)
    return torch.where(valid, rows, 0.0).sum(1) / valid.sum(1).clamp_min(1)


OBJECTIVES: dict[str, type[Objective]] = {"labels": Labels, "logits": Logits, "match": Match}


def check_name(name: str) -> None:
    """A term's name is also the name of a module in a distiller, and not every word can be one."""
    if "." in name or hasattr(nn.ModuleDict(), name):
        raise LimbeckError(f'"{name}" cannot name an objective: it has a dot, or is a word PyTorch keeps for itself.')


def build(declared: Mapping[str, Any], aligners: Container[str] = ()) -> Objective:
    """An objective from its place in a recipe: exactly one kind, and that kind's options."""
    kinds = [kind for kind in OBJECTIVES if kind in declared]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none of them"
        raise LimbeckError(f"an objective has exactly one of {', '.join(OBJECTIVES)}; here there is {found}.")
    kind = kinds[0]
    allowed = options_of(OBJECTIVES[kind])
    options = {key: value for key, value in declared.items() if key != kind}
    for key in options:
        if key not in allowed:
            raise LimbeckError(
                f'"{kind}" has no option "{key}".{did_you_mean(key, allowed)} Allowed: {", ".join(allowed)}.'
            )
    align = parse(options.get("align", "none"))
    if align.name not in aligners:
        bind(align, ALIGNERS, "aligner")
    return OBJECTIVES[kind](declared[kind], **options)
