"""Losses over a large vocabulary, from last hidden states and output embeddings, without ever holding all logits.

Logits are the largest tensors of a language model's step: 16 texts of 1024 tokens over 32000 words are 2 GiB in fp32,
for each model, and again for the gradient. Here they are made for some rows at a time, and once more for the backward
pass. How many rows at a time changes memory and speed, and nothing else.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from limbeck.distances import Scale, Temperature, logits_kl
from limbeck.errors import LimbeckError

ROWS = 1024


class Predictor(NamedTuple):
    """What a model's logits are made of: its last hidden states `(…, D)`, output embeddings `(V, D)` and bias `(V,)`.

    They are computed in the precision of the states; what follows, and the sums of gradients, in fp32 or better.
    """

    states: Tensor
    weight: Tensor
    bias: Tensor | None = None


def kl(
    student: Predictor,
    teacher: Predictor,
    *,
    temperature: Temperature = 1.0,
    scale: Scale = 1.0,
    truncate: bool = False,
    rows: int = ROWS,
) -> Tensor:
    """KL(teacher ‖ student) of the softened predictions, one number a token: `(…)`. The teacher gets no gradient.

    With `truncate`, a student may know only the first words of the teacher's vocabulary: the teacher's predictions are
    taken among those.
    """
    known, all_words = len(student.weight), len(teacher.weight)
    if known != all_words and not (truncate and known < all_words):
        raise LimbeckError(
            f"the student predicts {known} words and the teacher {all_words}: give models of one vocabulary, or "
            "truncate=True where the student's is the beginning of the teacher's."
        )
    bias = None if teacher.bias is None else teacher.bias[:known].detach()
    target = Predictor(teacher.states.detach(), teacher.weight[:known].detach(), bias)
    return _by_rows(partial(logits_kl, temperature=temperature, scale=scale), [student, target], [], rows)


def cross_entropy(student: Predictor, labels: Tensor, *, rows: int = ROWS) -> Tensor:
    """Cross-entropy with the right words `labels` `(…)`, one number a token: `(…)`; 0 where the label is -100."""
    return _by_rows(partial(F.cross_entropy, reduction="none"), [student], [labels.reshape(-1)], rows)


def _by_rows(loss: Callable[..., Tensor], predictors: list[Predictor], others: list[Tensor], rows: int) -> Tensor:
    """A loss of logits, one number a row, for some rows at a time."""
    if rows < 1:
        raise LimbeckError(f"rows={rows} must be 1 or more: the logits of that many tokens are held at a time.")
    shape = predictors[0].states.shape[:-1]
    columns = [p.states.reshape(-1, p.states.shape[-1]) for p in predictors] + others
    outputs = [(_adding(p.weight), None if p.bias is None else _adding(p.bias)) for p in predictors]

    def piece(*taken: Tensor) -> Tensor:
        logits = [_logits(states, *output) for states, output in zip(taken, outputs)]
        return loss(*logits, *taken[len(logits) :])

    # Nothing here draws, so no generator's state has to be kept, which a captured step could not read.
    pieces = [
        checkpoint(piece, *taken, use_reentrant=False, preserve_rng_state=False)
        for taken in zip(*(column.split(rows) for column in columns))
    ]
    return torch.cat(pieces).reshape(shape)  # type: ignore[arg-type]


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    made = _precise(F.linear(states, weight.to(states.dtype)))
    return made if bias is None else made + bias


def _adding(weight: Tensor) -> Tensor:
    """A weight whose gradients from all pieces autograd adds up in fp32 or better."""
    return _precise(weight) if weight.requires_grad else weight


def _precise(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
