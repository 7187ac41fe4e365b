"""Losses over a large vocabulary, from last hidden states and output embeddings, without ever holding all logits.

Logits are the largest tensors of a language model's step: 16 texts of 1024 tokens over 32000 words are 2 GiB in fp32,
for each model, and again for the gradient. Here they are made for some rows at a time, and once more for the backward
pass. How many rows at a time changes memory and speed, and nothing else.

Kernels that fuse the same are not used: liger-kernel's divergence gives one number for all rows, where one a row is
needed, holds a number for every row and word on the way, and asks the device for values, which a captured step cannot.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from limbeck.architectures import arguments, output_bias, output_map
from limbeck.distances import Scale, Temperature, logits_kl
from limbeck.errors import LimbeckError

ROWS = 1024


class Predictor(NamedTuple):
    """What a model's logits are made of: its last hidden states `(…, D)`, output embeddings `(V, D)` and bias `(V,)`,
    and what becomes of them then.

    They are computed in the precision of the states; what follows, and the sums of gradients, in fp32 or better.
    """

    states: Tensor
    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None  # logits are bent to stay below it


class Shaping(NamedTuple):
    """What a model does to logits behind its output embeddings."""

    scale: float = 1.0
    softcap: float | None = None


_tried: dict[tuple[type, Shaping], bool] = {}


def shaping(model: PreTrainedModel) -> Shaping | None:
    """What the model's settings say it does to logits; None where a trial shows that it does something else."""
    config = model.config
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    said = Shaping(scale, getattr(config, "final_logit_softcapping", None))
    key = (type(model), said)
    if key not in _tried:
        _tried[key] = _holds(model, said)
    return said if _tried[key] else None


@torch.no_grad()
def _holds(model: PreTrainedModel, said: Shaping) -> bool:
    """Whether the model's logits of some last states are those made here."""
    output = output_map(model)
    drawn = torch.randn(1, 2, output.in_features, generator=torch.Generator().manual_seed(0))
    states = 100 * drawn.to(output.weight)  # large, so that a bound shows
    hook = output.register_forward_pre_hook(lambda *_: (states,))
    try:
        with torch.random.fork_rng(devices=[]):
            ids = torch.arange(2, device=states.device).unsqueeze(0)
            masks = dict.fromkeys(("attention_mask", "decoder_attention_mask"), torch.ones_like(ids))
            theirs = model(**arguments(model, {"input_ids": ids, "labels": ids, **masks})).logits
    finally:
        hook.remove()
    ours = _logits(states, output.weight, output_bias(model), *said)
    return bool((ours - theirs).abs().max() <= 1e-2 * ours.abs().max())  # settled in half precision too


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
    distance = partial(logits_kl, temperature=temperature, scale=scale)
    return apart(distance, student, teacher, truncate=truncate, rows=rows)


def apart(
    distance: Callable[[Tensor, Tensor], Tensor],
    student: Predictor,
    teacher: Predictor,
    *,
    truncate: bool = False,
    rows: int = ROWS,
) -> Tensor:
    """Any distance of logits, as `kl`."""
    known, all_words = len(student.weight), len(teacher.weight)
    if known != all_words and not (truncate and known < all_words):
        raise LimbeckError(
            f"the student predicts {known} words and the teacher {all_words}: give models of one vocabulary, or "
            "truncate=True where the student's is the beginning of the teacher's."
        )
    bias = None if teacher.bias is None else teacher.bias[:known].detach()
    target = teacher._replace(states=teacher.states.detach(), weight=teacher.weight[:known].detach(), bias=bias)
    return _by_rows(distance, [student, target], [], rows)


def cross_entropy(student: Predictor, labels: Tensor, *, rows: int = ROWS) -> Tensor:
    """Cross-entropy with the right words `labels` `(…)`, one number a token: `(…)`; 0 where the label is -100."""
    return _by_rows(partial(F.cross_entropy, reduction="none"), [student], [labels.reshape(-1)], rows)


def told(model: Predictor, labels: Tensor, *, rows: int = ROWS) -> Tensor:
    """What scores need to know of each token, its cross-entropy and the word thought the likeliest: `(…, 2)`."""
    return _by_rows(loss_and_best, [model], [labels.reshape(-1)], rows)


def loss_and_best(logits: Tensor, labels: Tensor) -> Tensor:
    """The same, from whole logits; a float holds the number of a word exactly up to 2²⁴ of them."""
    losses = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none").view_as(labels)
    return torch.stack([losses, logits.argmax(-1).float()], -1)


def whole(logits: Tensor | Predictor) -> Tensor:
    """All logits at once: where the other model's are whole, there is no way round it."""
    return _logits(*logits) if isinstance(logits, Predictor) else logits


def _by_rows(loss: Callable[..., Tensor], predictors: list[Predictor], others: list[Tensor], rows: int) -> Tensor:
    """A loss of logits, a number or several a row, for some rows at a time."""
    if rows < 1:
        raise LimbeckError(f"rows={rows} must be 1 or more: the logits of that many tokens are held at a time.")
    shape = predictors[0].states.shape[:-1]
    columns = [p.states.reshape(-1, p.states.shape[-1]) for p in predictors] + others
    outputs = [(_adding(p.weight), None if p.bias is None else _adding(p.bias), p.scale, p.softcap) for p in predictors]

    def piece(*taken: Tensor) -> Tensor:
        logits = [_logits(states, *output) for states, output in zip(taken, outputs)]
        return loss(*logits, *taken[len(logits) :])

    # Nothing here draws, so no generator's state has to be kept, which a captured step could not read.
    pieces = [
        checkpoint(piece, *taken, use_reentrant=False, preserve_rng_state=False)
        for taken in zip(*(column.split(rows) for column in columns))
    ]
    found = torch.cat(pieces)  # type: ignore[arg-type]
    return found.reshape(shape + found.shape[1:])


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    made = _precise(F.linear(states, weight.to(states.dtype)))
    if bias is not None:
        made = made + bias
    if scale != 1:
        made = made * scale
    return made if softcap is None else (made / softcap).tanh() * softcap


def _adding(weight: Tensor) -> Tensor:
    """A weight whose gradients from all pieces autograd adds up in fp32 or better."""
    return _precise(weight) if weight.requires_grad else weight


def _precise(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
