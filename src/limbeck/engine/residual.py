"""`norm(x + dropout(h))` in one kernel each way: what a block of BERT ends its attention and its output with.

Torch takes three kernels forward and three back, each of them bound by memory. No mask is kept: backward draws it
again.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]  # torch brings it along where there is CUDA
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from transformers import PreTrainedModel

from limbeck import kernels
from limbeck.engine.beside import Beside
from limbeck.engine.blocks import Swapped
from limbeck.engine.dropout import Draws
from limbeck.engine.forks import Forks
from limbeck.engine.products import Leaf, norm_gradients

WIDEST = 8192  # numbers of a row: one program holds it
EACH = 16  # numbers that one thread holds
PARTS = {"dense": nn.Linear, "LayerNorm": nn.LayerNorm, "dropout": nn.Dropout}
ODDS = 1 << 16  # what is dropped is drawn by 16 bits, which Philox makes for eight numbers at once


class Residual(torch.autograd.Function):
    """`F.layer_norm(x + dropout(h))`, whose weights' gradients go to their leaves."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, x: Tensor, weight: Tensor, bias: Tensor, leaves: Sequence[Leaf], beside: Beside,
        eps: float, p: float, draws: Draws, forks: Forks,
    ):  # fmt: skip
        ctx.leaves, ctx.beside, ctx.p = leaves, beside, p
        ctx.fork = forks.join(x) if x.requires_grad else None
        seed, ctx.call = draws.next(h.device) if p else (None, 0)
        z = h.new_empty(h.shape)
        mean, rstd = (h.new_empty(*h.shape[:-1], 1, dtype=torch.float32) for _ in range(2))
        out = summed_and_normed(h, x, weight, bias, eps, (z, mean, rstd), p, seed, ctx.call)
        ctx.save_for_backward(z, mean, rstd, weight, bias, seed)
        return out

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of what is summed; those of the weights are written."""
        z, mean, rstd, weight, bias, seed = ctx.saved_tensors
        above = given[0].contiguous()
        norm_gradients(ctx.leaves, ctx.beside, above, z, mean, rstd, weight, bias)
        to_x = torch.empty_like(z)
        to_h = torch.empty_like(z) if ctx.p else to_x
        launch = kernels.grid(backward_row, mean.numel())
        launch(above, z, weight, mean, rstd, to_x, to_h, seed, ctx.call, **odds(ctx.p), **sizes(weight))
        if ctx.fork:
            ctx.fork.leave(to_x, shared=to_h is to_x)
        return to_h, None if ctx.fork else to_x, None, None, None, None, None, None, None, None


def summed_and_normed(
    h: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float, found: Sequence[Tensor | None] = (None, None, None),
    p: float = 0.0, seed: Tensor | None = None, call: int = 0,
) -> Tensor:  # fmt: skip
    """The norm of the sum. The sum itself, and the means and deviations of its rows, are written to `found`."""
    out = h.new_empty(h.shape)
    launch = kernels.grid(forward_row, h.numel() // len(weight))
    read = h.contiguous(), x.contiguous(), weight, bias
    launch(*read, out, *found, seed, call, EPS=eps, KEEPS=found[0] is not None, **odds(p), **sizes(weight))
    return out


def odds(p: float) -> dict[str, Any]:
    """What kernels are told about dropout."""
    return {"DROPPED": round(p * ODDS), "SCALE": 1 / (1 - p), "DROPS": p > 0}


def sizes(weight: Tensor) -> dict[str, int]:
    """What kernels are told about rows."""
    block = max(8, triton.next_power_of_2(len(weight)))
    return {"SIZE": len(weight), "GROUPS": block // 8, "num_warps": min(max(block // (32 * EACH), 1), 16)}


def trained_residuals(
    model: PreTrainedModel, leaves: Mapping[str, Leaf], beside: Beside, draws: Draws, forks: Forks
) -> dict[nn.Module, Callable[..., Tensor]]:
    """Another forward for every such module whose norm's weights have leaves."""
    made: dict[nn.Module, Callable[..., Tensor]] = {}
    for name, module in residuals(model).items():
        weights = (f"{name}.LayerNorm.{part}" for part in ("weight", "bias"))
        own = [leaves[weight] for weight in weights if weight in leaves]
        if len(own) == 2:
            made[module] = partial(_trained, module, (own, beside), (draws, forks))
    return made


def frozen_residuals(model: PreTrainedModel) -> dict[nn.Module, Callable[..., Tensor]]:
    """Another forward for every such module of a model that does not train."""
    return {module: partial(_frozen, module) for module in residuals(model).values()}


def _trained(
    module: Any,
    gradients: tuple[Sequence[Leaf], Beside],
    others: tuple[Draws, Forks],
    hidden_states: Tensor,
    input_tensor: Tensor,
) -> Tensor:
    leaves, dropout = gradients[0], module.dropout
    options = (*gradients, module.LayerNorm.eps, dropout.p if dropout.training else 0.0, *others)
    h, weights = module.dense(hidden_states), (leaf.tensor for leaf in leaves)
    return Residual.apply(h, input_tensor, *weights, *options)  # type: ignore[return-value]


def _frozen(module: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    norm = module.LayerNorm
    return summed_and_normed(module.dense(hidden_states), input_tensor, norm.weight, norm.bias, norm.eps)


def residuals(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules that give `LayerNorm(dropout(dense(hidden_states)) + input_tensor)` and nothing else, by name. Not
    those whose norm or dropout somebody watches: these do not run any more."""
    return {name: module for name, module in model.named_modules() if _is_residual(module)}


def _is_residual(module: Any) -> bool:
    parts = dict(module.named_children())
    if {name: type(part) for name, part in parts.items()} != PARTS:
        return False
    dense, norm, dropout = (parts[name] for name in PARTS)
    fits = norm.normalized_shape == (dense.out_features,) and dense.out_features <= WIDEST
    watched = any(part._forward_hooks or part._forward_pre_hooks for part in (norm, dropout))
    if not fits or watched or norm.bias is None or dropout.p == 1:
        return False
    return [*inspect.signature(module.forward).parameters] == ["hidden_states", "input_tensor"] and _adds_up(module)


@torch.no_grad()
def _adds_up(module: Any) -> bool:
    """Whether its forward puts its parts together as we do, seen by other parts in their place, whose order shows."""
    h = torch.linspace(-1, 1, 2 * module.dense.in_features).view(1, 2, -1)
    y = torch.linspace(-1, 1, 2 * module.dense.out_features).view(1, 2, -1)
    other = {module.dense: lambda h: h[..., :1].exp() + y, module.dropout: torch.sin, module.LayerNorm: torch.cos}
    with Swapped(other).running():
        found = module.forward(h, y.square())
    return isinstance(found, Tensor) and torch.equal(found, torch.cos(torch.sin(h[..., :1].exp() + y) + y.square()))


@triton.jit
def kept(seed, call, row, DROPPED: tl.constexpr, GROUPS: tl.constexpr):
    """Which numbers of a row are not dropped, eight a group."""
    group = row * GROUPS + tl.arange(0, GROUPS)
    nought = group * 0
    a, b, c, d = tl.philox(tl.load(seed), group, nought + call, nought, nought)
    place = tl.arange(0, 8)[None, :]
    first = tl.where(place < 2, a[:, None], b[:, None])
    last = tl.where(place < 6, c[:, None], d[:, None])
    bits = tl.where(place < 4, first, last) >> (16 * (place % 2)).to(tl.uint32)
    return (bits & 0xFFFF).to(tl.int32) >= DROPPED


@triton.jit(do_not_specialize=["call"])
def forward_row(
    h, x, weight, bias, out, sums, means, rstds, seed, call,
    EPS: tl.constexpr, KEEPS: tl.constexpr, DROPPED: tl.constexpr, SCALE: tl.constexpr, DROPS: tl.constexpr,
    SIZE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One program: one row. Dropout and the sum are rounded as torch rounds them."""
    row = tl.program_id(0)
    column = tl.arange(0, GROUPS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = column < SIZE
    at = row.to(tl.int64) * SIZE + column
    added = tl.load(h + at, inside, other=0.0)
    straight = tl.load(x + at, inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, inside, other=0.0).to(tl.float32)
    if DROPS:
        scaled = (added.to(tl.float32) * SCALE).to(added.dtype)
        added = tl.where(kept(seed, call, row, DROPPED, GROUPS), scaled, 0.0)
    rounded = (straight + added.to(tl.float32)).to(out.dtype.element_ty)
    z = rounded.to(tl.float32)
    mean = tl.sum(z) / SIZE
    far = tl.where(inside, z - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(far * far) / SIZE + EPS)
    tl.store(out + at, (far * rstd * scale + shift).to(out.dtype.element_ty), inside)
    if KEEPS:
        tl.store(sums + at, rounded, inside)
        tl.store(means + row, mean)
        tl.store(rstds + row, rstd)


@triton.jit(do_not_specialize=["call"])
def backward_row(
    above, sums, weight, means, rstds, to_x, to_h, seed, call,
    DROPPED: tl.constexpr, SCALE: tl.constexpr, DROPS: tl.constexpr,
    SIZE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One program: one row."""
    row = tl.program_id(0)
    column = tl.arange(0, GROUPS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = column < SIZE
    at = row.to(tl.int64) * SIZE + column
    rstd = tl.load(rstds + row)
    normed = (tl.load(sums + at, inside, other=0.0).to(tl.float32) - tl.load(means + row)) * rstd
    given = tl.load(above + at, inside, other=0.0).to(tl.float32)
    given = given * tl.load(weight + column, inside, other=0.0).to(tl.float32)
    gradient = rstd * (given - tl.sum(given) / SIZE - normed * (tl.sum(given * normed) / SIZE))
    rounded = gradient.to(to_x.dtype.element_ty)
    tl.store(to_x + at, rounded, inside)
    if DROPS:
        scaled = tl.where(kept(seed, call, row, DROPPED, GROUPS), rounded.to(tl.float32) * SCALE, 0.0)
        tl.store(to_h + at, scaled.to(to_h.dtype.element_ty), inside)
