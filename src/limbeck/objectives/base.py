"""What every term of a loss is: it says what it reads, and returns one number an example."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from limbeck.aligners import ALIGNERS
from limbeck.architectures import Shape
from limbeck.data.kinds import KINDS, Kind
from limbeck.errors import LimbeckError
from limbeck.mappings import Layers
from limbeck.spec import Call, bind, number, parse
from limbeck.taps import Features

# `plain` is the student on the inputs as they are, in a stage that mixes them.
Whose = Literal["student", "teacher", "plain"]


class Read(NamedTuple):
    """Somebody wants this feature of this layer of this model."""

    model: Whose
    feature: str
    layer: int


class Moment(NamedTuple):
    """Where training stands: everything a schedule or a draw may depend on."""

    seed: int = 0
    stage: int = 0
    epoch: int = 0
    progress: float = 0.0  # share of the stage's steps done
    step: int = 0


class Models(NamedTuple):
    """What an objective is bound to: the models' shapes (`teacher` is None where there is none), and the task."""

    student: Shape
    teacher: Shape | None
    kind: Kind = KINDS["classification"]
    live: tuple[PreTrainedModel, PreTrainedModel] | None = None  # student and teacher themselves, for who needs more
    train_labels: Tensor | None = None  # of every training example, by id


def ramp(progress: float, *, weight: float, over: Annotated[float, Field(gt=0)] = 1.0) -> float:
    """From 0 to `weight`, linearly over the first part `over` of the stage (CR-ILD)."""
    return weight * min(progress / over, 1.0)


def stairs(progress: float, *, weight: float, steps: Annotated[int, Field(gt=0)]) -> float:
    """From 0 towards `weight` in that many equal steps, the last one short of it (CR-ILD's code, a step an epoch)."""
    return weight * math.floor(progress * steps + 1e-9) / steps


WEIGHTS = {"ramp": ramp, "stairs": stairs}


class Objective(nn.Module):
    """One term. Subclasses give `bind`, `reads` and a forward to one number an example."""

    scale: Tensor
    layers = Layers((), ())  # which meet, where layers do
    compares_layers = False  # whether it reads layers alone, and so takes any input, whatever its task
    moves_to_encoder = False  # whether its features may be those of an encoder beside a decoder
    learns_labels = False
    uncapturable: str | None = None  # why a step with this term cannot be captured as a CUDA graph, if it cannot
    sides: tuple[Whose, Whose] = ("student", "teacher")  # whose features its forward gets
    pace: float = 1.0  # the learning rate of its own parameters, in units of the stage's
    moves_teacher = False  # whether the teacher is another when the stage is over
    passing: tuple[str, ...] = ()  # what of its state only training needs: in checkpoints, not in what a run leaves

    def __init__(self, weight: float | str) -> None:
        super().__init__()
        self.weight = str(weight)
        try:
            constant = number(weight)
            self.schedule: Callable[[float], float] = lambda progress: constant
        except ValueError:
            self.schedule = _schedule(weight)
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
        """One number an example, from the features of both sides."""
        raise NotImplementedError

    def finish(self) -> None:
        """What is left to do when the stage is over; done again where a run resumes before it was saved."""

    def layer_weights(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor | None:
        """How much each student layer (rows: `layers.student`) meets each teacher layer (columns: `layers.teacher`) on
        this batch; None where no layers meet."""
        return None


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


def per_example(distances: Tensor, mask: Tensor) -> Tensor:
    """The mean over each example's valid rows: `(batch, …)` → `(batch,)`. The one place where rows are reduced.

    Of several layers at once, `(layers, batch, …)` with one mask, it is `(layers, batch)`.
    """
    layers = distances.shape[: distances.dim() - mask.dim()]
    rows, valid = distances.reshape(*layers, len(mask), -1), mask.reshape(len(mask), -1)
    return torch.where(valid, rows, 0.0).sum(-1) / valid.sum(1).clamp_min(1)


def _schedule(weight: float | str) -> Callable[[float], float]:
    try:
        return bind(parse(weight), WEIGHTS, "weight")
    except LimbeckError as error:
        raise LimbeckError(f"weight {weight} is no number, and {error}") from error


def positive(name: str, value: float | str) -> float:
    """An option that has to be a number above 0."""
    return within(name, value, "above 0", lambda found: found > 0)


def within(name: str, value: float | str, said: str, fits: Callable[[float], bool]) -> float:
    """An option that has to be a number that `fits`, which is `said`."""
    with suppress(ValueError):
        if fits(found := number(value)):
            return found
    raise LimbeckError(f"{name} {value} must be a number {said}.")


def over_processes(total: Tensor) -> Tensor:
    """The sum over all processes, for terms that look at the whole batch."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
    return total


def from_processes(rows: Tensor) -> Tensor:
    """The rows of all processes, each of which has as many."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return rows
    gathered = [torch.empty_like(rows) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(gathered, rows)
    return torch.cat(gathered)
