"""Mean squared differences of rows, by one kernel each way, whatever precision the rows come in.

By torch's own operations, rows in half precision are copied to fp32, their squares are written and read again, and all
that once more on the way back.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from limbeck import kernels


def mean_squares(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean squared difference of every row, in fp32; of contiguous rows on a GPU."""
    return Squares.apply(student, teacher)  # type: ignore[return-value]


class Squares(torch.autograd.Function):
    """The kernels."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor) -> Tensor:
        """A number a row."""
        ctx.save_for_backward(student, teacher)
        found = torch.empty(student.shape[:-1], dtype=torch.float32, device=student.device)
        launch = kernels.grid(forward, found.numel())
        with torch.cuda.device_of(student):  # Triton launches on the current device; in backward autograd sets it
            launch(student, teacher, found, WIDTH=student.shape[-1], **_size(student))
        return found

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the precision of the rows."""
        student, teacher = ctx.saved_tensors
        wanted = zip((student, teacher), ctx.needs_input_grad)
        made = [torch.empty_like(rows) if needed else None for rows, needed in wanted]
        above = given[0].contiguous()
        launch = kernels.grid(backward, above.numel())
        launch(student, teacher, above, *made, WIDTH=student.shape[-1], **_size(student))
        return tuple(made)


def _size(rows: Tensor) -> dict[str, int]:
    """Numbers that a program holds, and how many threads share them."""
    block = triton.next_power_of_2(rows.shape[-1])
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 8)}


@triton.jit
def forward(student, teacher, found, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program: a row."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    ours = tl.load(student + row * WIDTH + at, at < WIDTH, 0.0).to(tl.float32)
    theirs = tl.load(teacher + row * WIDTH + at, at < WIDTH, 0.0).to(tl.float32)
    tl.store(found + row, tl.sum((ours - theirs) * (ours - theirs)) / WIDTH)


@triton.jit
def backward(student, teacher, above, to_student, to_teacher, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program: a row's gradients, where they are wanted."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    ours = tl.load(student + row * WIDTH + at, at < WIDTH, 0.0).to(tl.float32)
    theirs = tl.load(teacher + row * WIDTH + at, at < WIDTH, 0.0).to(tl.float32)
    slope = (ours - theirs) * (tl.load(above + row) * (2.0 / WIDTH))
    if to_student is not None:
        tl.store(to_student + row * WIDTH + at, slope.to(to_student.dtype.element_ty), at < WIDTH)
    if to_teacher is not None:
        tl.store(to_teacher + row * WIDTH + at, (-slope).to(to_teacher.dtype.element_ty), at < WIDTH)
