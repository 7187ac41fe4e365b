"""How two widths become one: an aligner takes the compared features, some layers a side, and makes them comparable.

Layers come as a list. Those of one row an example come as one tensor `(layers, batch, D)`, which is fewer kernels, if
an aligner says that it takes them `together`. Aligners are trained beside the student and saved beside it, never in it.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from limbeck.filters import Filters

Several = Sequence[Tensor] | Tensor  # layers
Sides = tuple[Several, Several]
Width = Annotated[int, Field(gt=0)]


class NoAligner(nn.Module):
    """Compare as is; both widths must be equal."""

    together = True

    def __init__(self, student: int, teacher: int, pairs: int) -> None:
        super().__init__()
        self.fits = student == teacher

    def forward(self, student: Several, teacher: Several) -> Sides:
        return student, teacher


class Linear(nn.Module):
    """A linear map a layer, from the student's width to the teacher's.

    At equal widths there is nothing to map and it is left out, unless `always`.
    """

    together = True

    def __init__(self, student: int, teacher: int, pairs: int, *, always: bool = False) -> None:
        super().__init__()
        count = pairs if always or student != teacher else 0
        self.maps = nn.ModuleList(nn.Linear(student, teacher) for _ in range(count))

    def forward(self, student: Several, teacher: Several) -> Sides:
        return _each(self.maps, student) if len(self.maps) else student, teacher


class Shared(nn.Module):
    """One linear map for all layers, from the student's width to the teacher's (TinyBERT)."""

    together = True

    def __init__(self, student: int, teacher: int, pairs: int) -> None:
        super().__init__()
        self.map = nn.Linear(student, teacher)

    def forward(self, student: Several, teacher: Several) -> Sides:
        return self.map(student) if isinstance(student, Tensor) else [self.map(s) for s in student], teacher


class Anchor(nn.Module):
    """A linear map that never trains: orthogonal, without bias."""

    weight: Tensor
    bias = None

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.register_buffer("weight", nn.init.orthogonal_(torch.empty(outside, inside)))

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.weight)


class Both(nn.Module):
    """Both sides to a common `width`, a map a layer and side (RAIL-KD).

    The teacher's maps stay at an orthogonal start: trained together, both sides collapse onto one direction.
    """

    together = True

    def __init__(self, student: int, teacher: int, pairs: int, *, width: Width = 128, train_teacher: bool = False):
        super().__init__()
        self.student = nn.ModuleList(nn.Linear(student, width) for _ in range(pairs))
        self.teacher = nn.ModuleList(_teacher_map(teacher, width, train_teacher) for _ in range(pairs))

    def forward(self, student: Several, teacher: Several) -> Sides:
        return _each(self.student, student), _each(self.teacher, teacher)


class Concat(nn.Module):
    """All layers of a side joined into one vector, then mapped to `width`, a map a side (RAIL-KD's concatenation)."""

    together = True

    def __init__(self, student: int, teacher: int, pairs: int, *, width: Width = 128, train_teacher: bool = False):
        super().__init__()
        self.student = nn.Linear(student * pairs, width)
        self.teacher = _teacher_map(teacher * pairs, width, train_teacher)

    def forward(self, student: Several, teacher: Several) -> Sides:
        return [self.student(torch.cat(list(student), -1))], [self.teacher(torch.cat(list(teacher), -1))]


ALIGNERS = {"none": NoAligner, "linear": Linear, "shared": Shared, "both": Both, "concat": Concat, "filters": Filters}


def _teacher_map(inside: int, outside: int, train: bool) -> nn.Module:
    return nn.Linear(inside, outside, bias=False) if train else Anchor(inside, outside)


def _each(maps: Iterable[Any], states: Several) -> Several:
    """Each layer through its own map."""
    if not isinstance(states, Tensor):
        return [one(state) for one, state in zip(maps, states)]
    maps = list(maps)
    biases = [one.bias for one in maps if one.bias is not None]
    return Maps.apply(states, torch.stack([one.weight for one in maps]), torch.stack(biases) if biases else None)


class Maps(torch.autograd.Function):
    """A linear map a layer, all at once. By autograd's own, every weight's gradient would lie turned, and be copied."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
        """`(layers, batch, D)` by `(layers, width, D)`."""
        ctx.save_for_backward(states, weights)
        if biases is None:
            return states @ weights.mT
        return torch.baddbmm(biases.unsqueeze(1), states, weights.mT)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        """Those that are wanted."""
        (states, weights), (above,), wanted = ctx.saved_tensors, given, ctx.needs_input_grad
        return (
            above @ weights if wanted[0] else None,
            above.mT @ states if wanted[1] else None,
            above.sum(1) if wanted[2] else None,
        )
