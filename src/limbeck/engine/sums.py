"""Gradients that are sums of rows: of biases, of norms and of embeddings, as Triton kernels for bf16.

Of a small batch these sums are a few megabytes, and what they take is waiting: for many small loads one after another,
for a second kernel that ends what the first began, for a copy to where the sum belongs. Here a program asks for all it
can hold at once, adds in fp32, and leaves the sum in its place. Nothing is added in an order that may change.
"""

from collections.abc import Sequence

import torch
import triton  # pyright: ignore[reportMissingImports]  # torch brings it along where there is CUDA
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from limbeck import kernels

MOST = 8192  # rows, and columns: more of them keep the GPU busy the way torch adds them, too
TILE = {"ROWS": 512, "COLUMNS": 16, "num_warps": 8}  # four loads of 16 bytes a thread are under way
SEGMENT = {"ROWS": 32, "COLUMNS": 256, "num_warps": 4}


def worth(rows: Tensor) -> bool:
    """Whether the columns of these rows are better added here than by torch."""
    return max(rows.shape) <= MOST and rows.stride(-1) == 1


def add_columns(rows: Tensor, out: Tensor, add: bool) -> None:
    """The sum of rows, added to what is there or in its stead."""
    launch = kernels.grid(columns_of, triton.cdiv(rows.shape[1], TILE["COLUMNS"]))
    launch(rows, out, *rows.shape, rows.stride(0), ADD=add, **TILE)


def add_norm(
    above: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, scale: tuple[Tensor, bool], shift: tuple[Tensor, bool]
) -> None:
    """The gradients of a norm's scale and shift, of rows and the gradients above them. Each of the two is written to
    its tensor, or added if so told."""
    given = (above, x, mean, rstd, scale[0], shift[0], *x.shape, above.stride(0), x.stride(0))
    launch = kernels.grid(norm_of, triton.cdiv(x.shape[1], TILE["COLUMNS"]))
    launch(*given, ADD_SCALE=scale[1], ADD_SHIFT=shift[1], **TILE)


def segments(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids in order, where each of them stood, and where those equal to it end."""
    ordered, stood = ids.flatten().sort(stable=True)
    return ordered, stood, torch.searchsorted(ordered, ordered, right=True, out_int32=True)


def add_by_id(rows: Tensor, segments: Sequence[Tensor], table: Tensor, padding: int) -> None:
    """Add every row to that of the table which has its id; rows of the padding id are left out, none if it is -1."""
    launch = kernels.grid(by_id, len(rows), triton.cdiv(rows.shape[1], SEGMENT["COLUMNS"]))
    launch(rows, *segments, table, rows.shape[1], rows.stride(0), table.stride(0), padding, **SEGMENT)


@triton.jit(do_not_specialize=["rows"])
def columns_of(
    given, out, rows, columns, stride,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: some columns, all rows."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    places = given + row[:, None] * stride + column[None, :]
    totals = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        inside = (start + row < rows)[:, None] & (column < columns)[None, :]
        totals += tl.load(places, inside, other=0.0).to(tl.float32)
        places += ROWS * stride
    keep(out + column, tl.sum(totals, 0), column < columns, ADD)


@triton.jit(do_not_specialize=["rows"])
def norm_of(
    above, given, mean, rstd, scale, shift, rows, columns, stride_above, stride,
    ADD_SCALE: tl.constexpr, ADD_SHIFT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: some columns, all rows."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    aboves = above + row[:, None] * stride_above + column[None, :]
    places = given + row[:, None] * stride + column[None, :]
    scales = tl.zeros([ROWS, COLUMNS], tl.float32)
    shifts = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        present = start + row < rows
        inside = present[:, None] & (column < columns)[None, :]
        gradient = tl.load(aboves, inside, other=0.0).to(tl.float32)
        x = tl.load(places, inside, other=0.0).to(tl.float32)
        centre = tl.load(mean + start + row, present, other=0.0)
        width = tl.load(rstd + start + row, present, other=0.0)
        scales += gradient * ((x - centre[:, None]) * width[:, None])
        shifts += gradient
        aboves += ROWS * stride_above
        places += ROWS * stride
    keep(scale + column, tl.sum(scales, 0), column < columns, ADD_SCALE)
    keep(shift + column, tl.sum(shifts, 0), column < columns, ADD_SHIFT)


@triton.jit(do_not_specialize=["padding"])
def by_id(
    given, ids, stood, ends, table, columns, stride, stride_table, padding,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: some columns of all rows of one id, if it stands at the first of them."""
    first = tl.program_id(0)
    own = tl.load(ids + first)
    if (own != tl.load(ids + first - 1, first > 0, other=-1)) & (own != padding):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        end = tl.load(ends + first)
        total = tl.zeros([COLUMNS], tl.float32)
        for start in range(first, end, ROWS):
            place = start + tl.arange(0, ROWS)
            row = tl.load(stood + place, place < end, other=0)
            inside = (place < end)[:, None] & (column < columns)[None, :]
            found = tl.load(given + row[:, None] * stride + column[None, :], inside, other=0.0)
            total += tl.sum(found.to(tl.float32), 0)
        places = table + own.to(tl.int64) * stride_table + column
        keep(places, total, column < columns, True)  # pyright: ignore[reportArgumentType]


@triton.jit
def keep(places, sums, inside, ADD: tl.constexpr):
    """Store sums, or add them to what is there."""
    if ADD:
        sums += tl.load(places, inside, other=0.0).to(tl.float32)
    tl.store(places, sums.to(places.dtype.element_ty), inside)
