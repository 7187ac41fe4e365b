"""The mean state of an example's tokens, by one kernel each way, in whatever precision the states come.

By torch's own operations, all states are copied to fp32 first, and their gradients from fp32.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.autograd.function import once_differentiable

from limbeck import kernels

TILE = {"ROWS": 64, "COLUMNS": 64, "num_warps": 4}  # tokens and dimensions that a program holds


def token_means(states: Tensor, mask: Tensor) -> Tensor:
    """Means of `(batch, tokens, D)` over the tokens of the mask, in fp32; of contiguous states on a GPU."""
    return Means.apply(states, mask)  # type: ignore[return-value]


class Means(torch.autograd.Function):
    """The kernels."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, mask: Tensor) -> Tensor:
        """A row an example."""
        mask = mask.bool().contiguous().view(torch.uint8)
        ctx.save_for_backward(mask)
        ctx.shape, ctx.dtype = states.shape, states.dtype
        batch, tokens, width = states.shape
        found = torch.empty(batch, width, dtype=torch.float32, device=states.device)
        launch = kernels.grid(forward, batch, triton.cdiv(width, TILE["COLUMNS"]))
        with torch.cuda.device_of(states):  # Triton launches on the current device; in backward autograd sets it
            launch(states, mask, found, tokens, width, **TILE)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None]:
        """The gradient of the states, in their precision."""
        (mask,) = ctx.saved_tensors
        batch, tokens, width = ctx.shape
        made = torch.empty(ctx.shape, dtype=ctx.dtype, device=mask.device)
        launch = kernels.grid(backward, batch, triton.cdiv(width, TILE["COLUMNS"]))
        launch(given[0].contiguous(), mask, made, tokens, width, **TILE)
        return made, None


@triton.jit(do_not_specialize=["tokens"])
def forward(states, mask, found, tokens, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One program: some dimensions of one example."""
    example = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    places = states + (example.to(tl.int64) * tokens + row)[:, None] * width + column[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    count = tl.zeros([ROWS], tl.int32)
    for start in range(0, tokens, ROWS):
        there = tl.load(mask + example * tokens + start + row, start + row < tokens, other=0) != 0
        total += tl.load(places, there[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)
        count += there.to(tl.int32)
        places += ROWS * width
    mean = tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1).to(tl.float32)
    tl.store(found + example * width + column, mean, column < width)


@triton.jit(do_not_specialize=["tokens"])
def backward(above, mask, made, tokens, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One program: some dimensions of one example's tokens, padding included, whose gradient is 0."""
    example = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    count = tl.zeros([ROWS], tl.int32)
    for start in range(0, tokens, ROWS):
        there = tl.load(mask + example * tokens + start + row, start + row < tokens, other=0) != 0
        count += there.to(tl.int32)
    share = tl.load(above + example * width + column, column < width, other=0.0)
    share = share / tl.maximum(tl.sum(count, 0), 1).to(tl.float32)
    places = made + (example.to(tl.int64) * tokens + row)[:, None] * width + column[None, :]
    for start in range(0, tokens, ROWS):
        there = tl.load(mask + example * tokens + start + row, start + row < tokens, other=0) != 0
        gradient = tl.where(there[:, None], share[None, :], 0.0)
        inside = (start + row < tokens)[:, None] & (column < width)[None, :]
        tl.store(places, gradient.to(made.dtype.element_ty), inside)
        places += ROWS * width
