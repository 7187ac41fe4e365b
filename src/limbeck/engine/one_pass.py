"""AdamW in one pass over memory: weights, both moments and the weights' bf16 copies, from bf16 gradients.

An update is bound by memory. Done by torch, gradients are first copied to fp32, then read twice, and the new weights
are read again to be copied. Here each number is read once and written once, and a step of a small batch notices. So it
does of aligners, which have no copies: torch gives a few small weights to a few of a GPU's processors.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]  # torch brings it along where there is CUDA
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from limbeck import kernels

BLOCK = 4096  # numbers that one program updates
ALIGNED = 4  # numbers of four bytes that a wide load takes


class Place(NamedTuple):
    """A weight, all that goes with it, and its group of the optimiser."""

    weight: Tensor
    copy: Tensor | None  # bf16
    gradient: Tensor | None  # of one backward, bf16
    sum: Tensor  # of several, fp32; without a copy, of one as well
    group: dict[str, Any]


class Gathered:
    """The gradients that autograd leaves at these weights, one after another."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = list(weights)
        spaces = [-(-weight.numel() // ALIGNED) * ALIGNED for weight in weights]
        self.flat = torch.zeros(sum(spaces), device=weights[0].device)
        cut = zip(self.flat.split(spaces), weights)
        self.parts = [space[: weight.numel()].view_as(weight) for space, weight in cut]

    def gather(self) -> Tensor:
        """Copy them; of a weight that has none, zeros."""
        found = [(part, weight.grad) for part, weight in zip(self.parts, self.weights) if weight.grad is not None]
        if len(found) < len(self.parts):
            self.flat.zero_()
        if found:
            torch._foreach_copy_(*map(list, zip(*found)))  # pyright: ignore
        return self.flat


class OnePass:
    """Updates these weights as the optimiser would, whose state it uses; the optimiser itself must not move them."""

    def __init__(self, optimizer: torch.optim.AdamW, places: Sequence[Place], gathered: Gathered | None = None) -> None:
        self.optimizer, self.places, self.gathered = optimizer, list(places), gathered
        device = places[0].weight.device
        sizes = [place.weight.numel() for place in places]
        alike: dict[tuple[bool, bool], list[tuple[int, int]]] = {}
        for i, (place, size) in enumerate(zip(places, sizes)):
            for start in range(0, size, BLOCK):
                alike.setdefault((place.copy is not None, start + BLOCK <= size), []).append((i, start))
        self.chunks = [(torch.tensor(found, device=device), *how) for how, found in alike.items()]
        self.decays = torch.tensor([place.group["weight_decay"] for place in places], device=device)
        (beta1, beta2), eps = optimizer.defaults["betas"], optimizer.defaults["eps"]
        logs = {name: math.log(max(beta, sys.float_info.min)) for name, beta in (("LOG1", beta1), ("LOG2", beta2))}
        self.constants = {"BETA1": beta1, "BETA2": beta2, "EPS": eps, **logs}
        self.table = torch.zeros(len(places), 8, dtype=torch.int64, device=device)
        self.locate()

    def locate(self) -> None:
        """Find out where everything lies: call it when the optimiser's state has been replaced."""
        states = [self.optimizer.state[place.weight] for place in self.places]
        self.steps = [state["step"] for state in states]
        rows = []
        for place, state in zip(self.places, states):
            read = (place.weight, state["exp_avg"], state["exp_avg_sq"], place.copy, place.gradient, place.sum)
            at = (0 if tensor is None else tensor.data_ptr() for tensor in (*read, place.group["lr"]))
            rows.append([*at, place.weight.numel()])
        self.table.copy_(torch.tensor(rows))

    def gather(self) -> list[Tensor]:
        """Bring along the gradients that autograd left: one tensor, or none where all weights have copies."""
        return [self.gathered.gather()] if self.gathered else []

    def __call__(self, factor: Tensor, *, summed: bool) -> None:
        """Update all weights by their gradients times a factor; by their sums, where a batch came in pieces."""
        torch._foreach_add_(self.steps, 1)  # pyright: ignore
        given = (self.decays, self.steps[0], factor)
        for chunks, copied, full in self.chunks:
            launch = kernels.grid(update, len(chunks))
            how = {"SUMMED": summed or not copied, "COPIED": copied, "FULL": full}
            launch(self.table, chunks, *given, **how, BLOCK=BLOCK, **self.constants)


@triton.jit
def update(
    table, chunks, decays, step, factor,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr, EPS: tl.constexpr,
    SUMMED: tl.constexpr, COPIED: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: some numbers of one weight."""
    entry = tl.load(chunks + 2 * tl.program_id(0))
    at = tl.multiple_of(tl.load(chunks + 2 * tl.program_id(0) + 1), BLOCK) + tl.arange(0, BLOCK)
    row = table + 8 * entry
    # A block that is full needs no mask, and is read and written some numbers at a time.
    inside = None if FULL else at < tl.load(row + 7)
    weights = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16) + at
    firsts = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), 16) + at
    seconds = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16) + at
    rate = tl.load(tl.load(row + 6).to(tl.pointer_type(tl.float32)))
    if SUMMED:
        gradient = tl.load(tl.multiple_of(tl.load(row + 5).to(tl.pointer_type(tl.float32)), 16) + at, inside)
    else:
        half = tl.load(tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(tl.bfloat16)), 16) + at, inside)
        gradient = half.to(tl.float32)
    gradient = gradient * tl.load(factor)
    time = tl.load(step).to(tl.float64)
    begun1 = (1.0 - tl.exp(time * LOG1)).to(tl.float32)
    begun2 = (1.0 - tl.exp(time * LOG2)).to(tl.float32)
    first = tl.load(firsts, inside)
    first = first + (1.0 - BETA1) * (gradient - first)
    second = tl.load(seconds, inside) * BETA2 + (1.0 - BETA2) * gradient * gradient
    weight = tl.load(weights, inside) * (1.0 - rate * tl.load(decays + entry))
    weight = weight - rate / begun1 * first / (tl.sqrt(second) / tl.sqrt(begun2) + EPS)
    tl.store(firsts, first, inside)
    tl.store(seconds, second, inside)
    tl.store(weights, weight, inside)
    if COPIED:
        copies = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.bfloat16)), 16) + at
        tl.store(copies, weight.to(tl.bfloat16), inside)
