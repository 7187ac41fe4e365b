"""Squared differences of rows, as they are or as unit vectors, by one kernel each way, in whatever precision they come.

By torch's own operations, rows in half precision are copied to fp32, their squares are written and read again, and all
that once more on the way back; unit vectors take a dozen kernels more.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.autograd.function import once_differentiable

from limbeck import kernels

LEAST = 1e-12  # a norm is taken for no less, as torch takes it


def mean_squares(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean squared difference of every row, in fp32; of contiguous rows on a GPU."""
    return Squares.apply(student, teacher, False, 1 / student.shape[-1])  # type: ignore[return-value]


def unit_squares(student: Tensor, teacher: Tensor, *, mean: bool) -> Tensor:
    """The same of the rows' unit vectors: the mean squared difference, or the sum."""
    return Squares.apply(student, teacher, True, 1 / student.shape[-1] if mean else 1.0)  # type: ignore[return-value]


class Squares(torch.autograd.Function):
    """The kernels."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, unit: bool, scale: float) -> Tensor:
        """A number a row."""
        ctx.save_for_backward(student, teacher)
        ctx.how = {"UNIT": unit, "SCALE": scale, "LEAST": LEAST, **_size(student)}
        found = torch.empty(student.shape[:-1], dtype=torch.float32, device=student.device)
        launch = kernels.grid(forward, found.numel())
        with torch.cuda.device_of(student):  # Triton launches on the current device; in backward autograd sets it
            launch(student, teacher, found, **ctx.how)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the precision of the rows."""
        student, teacher = ctx.saved_tensors
        wanted = zip((student, teacher), ctx.needs_input_grad)
        made = [torch.empty_like(rows) if needed else None for rows, needed in wanted]
        above = given[0].contiguous()
        launch = kernels.grid(backward, above.numel())
        launch(student, teacher, above, *made, **ctx.how)
        return *made, None, None


def _size(rows: Tensor) -> dict[str, int]:
    """Numbers that a program holds, and how many threads share them."""
    width = rows.shape[-1]
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(max(block // 512, 1), 8)}


@triton.jit
def forward(
    student, teacher, found,
    UNIT: tl.constexpr, SCALE: tl.constexpr, LEAST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a row."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    ours = tl.load(student + row * WIDTH + at, at < WIDTH, 0.0).to(tl.float32)
    theirs = tl.load(teacher + row * WIDTH + at, at < WIDTH, 0.0).to(tl.float32)
    if UNIT:
        ours /= norm(ours, LEAST)
        theirs /= norm(theirs, LEAST)
    tl.store(found + row, tl.sum((ours - theirs) * (ours - theirs)) * SCALE)


@triton.jit
def backward(
    student, teacher, above, to_student, to_teacher,
    UNIT: tl.constexpr, SCALE: tl.constexpr, LEAST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a row's gradients, where they are wanted."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    ours = tl.load(student + row * WIDTH + at, at < WIDTH, 0.0).to(tl.float32)
    theirs = tl.load(teacher + row * WIDTH + at, at < WIDTH, 0.0).to(tl.float32)
    above_row = tl.load(above + row) * (2.0 * SCALE)
    if UNIT:
        length, their_length = norm(ours, LEAST), norm(theirs, LEAST)
        ours /= length
        theirs /= their_length
    slope = (ours - theirs) * above_row
    if to_student is not None:
        made = of_direction(slope, ours, length, LEAST) if UNIT else slope
        tl.store(to_student + row * WIDTH + at, made.to(to_student.dtype.element_ty), at < WIDTH)
    if to_teacher is not None:
        made = of_direction(-slope, theirs, their_length, LEAST) if UNIT else -slope
        tl.store(to_teacher + row * WIDTH + at, made.to(to_teacher.dtype.element_ty), at < WIDTH)


@triton.jit
def norm(rows, LEAST: tl.constexpr):
    """The length of a row."""
    return tl.maximum(tl.sqrt(tl.sum(rows * rows)), LEAST)


@triton.jit
def of_direction(slope, unit, length, LEAST: tl.constexpr):
    """The gradient of a vector, from that of its direction: what is along the vector changes nothing, unless it is too
    short to have a direction."""
    along = tl.where(length > LEAST, tl.sum(slope * unit), 0.0)
    return (slope - unit * along) / length
