"""Replacement: the task's loss of a model made of the student's layers here and the teacher's blocks there."""

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from limbeck import architectures, views
from limbeck.errors import LimbeckError
from limbeck.features import LOGITS
from limbeck.objectives.base import Models, Moment, NamedAligner, Read
from limbeck.objectives.predictions import Labels
from limbeck.spec import Call, bind, parse
from limbeck.taps import Features, Tap

Rate = Annotated[float, Field(ge=0, le=1)]


def grow(moment: Moment, *, start: Rate = 0.1, over: Annotated[float, Field(gt=0, le=1)] = 0.65) -> float:
    """From `start` to 1, over that share of the stage."""
    return min(1.0, start + (1 - start) * moment.progress / over)


def linear(moment: Moment, *, start: Rate = 0.1, slope: Annotated[float, Field(ge=0)] = 0.0006) -> float:
    """From `start`, by `slope` a step, to 1."""
    return min(1.0, start + slope * moment.step)


def hold(moment: Moment, *, rate: Rate = 0.7, steps: Annotated[int, Field(ge=0)] = 2500) -> float:
    """`rate` for that many steps, then 1."""
    return rate if moment.step < steps else 1.0


RATES = {"grow": grow, "linear": linear, "hold": hold}


class Replacement(Labels):
    """The task's own loss where, for each layer of the student, chance puts in the layer itself or the teacher's blocks
    it stands for (BERT-of-Theseus). `rate` is the probability of the layer, which changes as training goes on.

    Gradients pass through the teacher's blocks, which do not change. Student and teacher need one width.
    """

    replaced: Tensor

    def __init__(
        self, replacement: str | Call = "cross_entropy", *, rate: str | Call = "grow", weight: float | str = 1.0
    ) -> None:
        super().__init__(replacement, weight=weight)
        self.rate = bind(parse(rate), RATES, "rate")

    def bind(self, models: Models, named: Mapping[str, NamedAligner]) -> None:
        super().bind(models, named)
        if models.live is None:
            raise LimbeckError("replacement needs a teacher, and there is none. Give --teacher.")
        student, teacher = models.live
        _check_blocks(student, teacher)
        ours, theirs = architectures.blocks(student), architectures.blocks(teacher.eval().requires_grad_(False))
        count, depth = len(ours), len(theirs)
        self.register_buffer("replaced", torch.zeros(count, dtype=torch.bool), persistent=False)
        either = [
            Either(layer, theirs[i * depth // count : (i + 1) * depth // count], lambda i=i: self.replaced[i])
            for i, layer in enumerate(ours)
        ]
        # In a list, so that nn.Module does not register them: the teacher is nobody's parameter.
        self._hybrid = [Tap(views.rebuilt(student, either), [("logits", LOGITS)])]
        self._teacher = [theirs]

    def at(self, moment: Moment) -> None:
        super().at(moment)
        chance, rate = random.Random(f"{moment.seed}/{moment.stage}/{moment.step}"), self.rate(moment)
        drawn = torch.tensor([chance.random() < rate for _ in range(len(self.replaced))])
        self.replaced.copy_(drawn, non_blocking=True)

    def _apply(self, fn: Any, recurse: bool = True) -> "Replacement":
        """Move the teacher's blocks too when the module is moved, though they are not registered."""
        for blocks in self._teacher:
            blocks._apply(fn)
        return super()._apply(fn, recurse)

    def reads(self) -> set[Read]:
        return set()

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        return super().forward(self._hybrid[0](**batch), teacher, batch)


def _check_blocks(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Raise where blocks of the teacher cannot stand among the student's."""
    ours, theirs = student.config, teacher.config
    if (ours.model_type, ours.hidden_size) != (theirs.model_type, theirs.hidden_size):
        raise LimbeckError(
            "replacement puts blocks of the teacher among the student's, and needs one family and one width: the "
            f"student is {ours.model_type}, width {ours.hidden_size}, the teacher "
            f"{theirs.model_type}, width {theirs.hidden_size}."
        )
    if architectures.model_type(theirs) not in architectures.FAMILIES:
        raise LimbeckError(
            f"replacement takes a model apart, and how models of type {theirs.model_type} are made is "
            "guessed from the whole. Give it an entry in limbeck/architectures.py, or use another recipe."
        )
    if len(types := sorted(set(getattr(theirs, "layer_types", None) or ()))) > 1:
        raise LimbeckError(
            "replacement gives blocks of the teacher what the student's layer is given, its mask and positions; "
            f"the layers of {ours.model_type} are of several types ({', '.join(types)}). Use another "
            "recipe for this family."
        )
    if any("relative_attention_bias" in name for name, _ in architectures.blocks(teacher)[0].named_parameters()):
        raise LimbeckError(
            f"replacement: the first block of a {ours.model_type} decoder makes the positions of all "
            "others, so that blocks of two models cannot take turns. Use another recipe for this family."
        )


class Either(nn.Module):
    """A layer of the student, or the blocks it stands for. Both run, so that a captured step serves every draw."""

    def __init__(self, successor: nn.Module, originals: Iterable[nn.Module], replaced: Callable[[], Tensor]) -> None:
        super().__init__()
        self.successor, self.originals, self.replaced = successor, nn.ModuleList(originals), replaced

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = self.successor(hidden_states, *args, **kwargs)
        ours = output if isinstance(output, Tensor) else output[0]
        # The student may run in half precision, and its mask be in that too.
        dtype = next(self.originals.parameters()).dtype
        theirs, *given = (_cast(value, dtype) for value in (hidden_states, *args))
        named = {name: _cast(value, dtype) for name, value in kwargs.items()}
        for block in self.originals:
            found = block(theirs, *given, **named)
            theirs = found if isinstance(found, Tensor) else found[0]
        chosen = torch.where(self.replaced(), ours, theirs.to(ours.dtype))
        return chosen if isinstance(output, Tensor) else (chosen, *output[1:])


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Numbers in another precision; whatever else as it is."""
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
