"""Linear maps and norms as they run while a student trains in half precision.

Queries, keys and values are one product, of weights that lie one below another. Gradients of weights are written where
the optimiser reads them, beside the rest of the backward. What comes out is what torch's own modules give.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from limbeck import architectures
from limbeck.engine.beside import Beside

ALIGNED = 8  # numbers of two bytes that a wide load takes


class Leaf:
    """The bf16 copy of a weight, or of several one below another, and where its gradient goes."""

    def __init__(self, names: Sequence[str], rows: Sequence[int], copy: Tensor, gradient: Tensor) -> None:
        self.names, self.rows = list(names), list(rows)
        self.tensor, self.gradient = copy.detach().requires_grad_(), gradient
        self.written = False  # whether this backward has a gradient there already

    def copies(self) -> dict[str, Tensor]:
        """Each weight's part of the copy, by its name."""
        return self._parts(self.tensor)

    def gradients(self) -> dict[str, Tensor]:
        """Each weight's part of the gradient."""
        return self._parts(self.gradient)

    def _parts(self, whole: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.names, whole.split(self.rows) if len(self.rows) > 1 else [whole]))

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """A gradient that is a matrix product."""
        if self.written:
            self.gradient.addmm_(left, right)
        else:
            torch.mm(left, right, out=self.gradient)
        self.written = True

    def add_sum(self, rows: Tensor) -> None:
        """A gradient that is a sum of rows."""
        if self.written:
            self.gradient.add_(rows.sum(0))
        else:
            torch.sum(rows, 0, out=self.gradient)
        self.written = True

    def add(self, gradient: Tensor) -> None:
        """A gradient."""
        if self.written:
            self.gradient.add_(gradient)
        else:
            self.gradient.copy_(gradient)
        self.written = True


class Product(torch.autograd.Function):
    """`F.linear`, whose weights' gradients go to their leaves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, leaves: Sequence[Leaf], beside: Beside):
        ctx.save_for_backward(x, weight)
        ctx.leaves, ctx.beside = leaves, beside
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the input; those of the weights are written."""
        x, weight = ctx.saved_tensors
        above, rows = given[0].flatten(0, -2), x.flatten(0, -2)
        with ctx.beside(above, rows):
            ctx.leaves[0].add_product(above.t(), rows)
            for bias in ctx.leaves[1:]:
                bias.add_sum(above)
        return given[0] @ weight if ctx.needs_input_grad[0] else None, None, None, None, None


class Norm(torch.autograd.Function):
    """`F.layer_norm`, whose weights' gradients go to their leaves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, leaves: Sequence[Leaf], beside: Beside, eps: float):
        out, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.leaves, ctx.beside = leaves, beside
        return out

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the input; those of the weights are written."""
        x, mean, rstd, weight, bias = ctx.saved_tensors
        norm_gradients(ctx.leaves, ctx.beside, given[0], *ctx.saved_tensors)
        back = partial(torch.ops.aten.native_layer_norm_backward, given[0], x, weight.shape, mean, rstd, weight, bias)
        return back([True, False, False])[0] if ctx.needs_input_grad[0] else None, None, None, None, None, None


def norm_gradients(
    leaves: Sequence[Leaf], beside: Beside, above: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *weights: Tensor
) -> None:
    """Write the gradients of a norm's weights, from the gradient of what it gave, and what it was given."""
    back = torch.ops.aten.native_layer_norm_backward
    with beside(above, x, mean, rstd):
        found = back(above, x, weights[0].shape, mean, rstd, *weights, [False, True, True])[1:]
        for leaf, gradient in zip(leaves, found):
            leaf.add(gradient)


class Joint:
    """Linear maps of one input, multiplied at once by the first, for all."""

    def __init__(self, maps: Sequence[nn.Linear], product: Callable[[Tensor], Tensor]) -> None:
        self.maps, self.product = maps, product
        self.given: Tensor | None = None
        self.made: Sequence[Tensor] = ()

    def __call__(self, place: int, x: Tensor) -> Tensor:
        """What one of the maps gives."""
        if place == 0:
            self.given, self.made = x, self.product(x).split([one.out_features for one in self.maps], -1)
        elif x is not self.given:  # it is asked about something else, such as positions
            return nn.Linear.forward(self.maps[place], x)
        made = self.made[place]
        if place == len(self.maps) - 1:
            self.given, self.made = None, ()
        return made

    def forwards(self) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
        """What each of the maps is to run instead of its own."""
        return {one: partial(self, place) for place, one in enumerate(self.maps)}


def product(leaves: Sequence[Leaf], beside: Beside) -> Callable[[Tensor], Tensor]:
    """A linear map by these weights."""
    weight, bias = leaves[0].tensor, leaves[1].tensor if len(leaves) > 1 else None
    return lambda x: Product.apply(x, weight, bias, leaves, beside)  # type: ignore[return-value]


def norm(leaves: Sequence[Leaf], beside: Beside, eps: float) -> Callable[[Tensor], Tensor]:
    """A norm by these weights."""
    weight, bias = (leaf.tensor for leaf in leaves)
    return lambda x: Norm.apply(x, weight, bias, leaves, beside, eps)  # type: ignore[return-value]


def joints(model: PreTrainedModel) -> list[list[str]]:
    """The names of the maps that are given the same input: queries, keys and values of every self-attention."""
    names = {module: name for name, module in model.named_modules()}
    found: dict[nn.Module, list[str]] = {}
    for side in architectures.sides(model):
        for layer in range(1, architectures.shape(model).at(side).layers + 1):
            attention = architectures.attention(model, layer, side)
            maps = [m for name, m in attention.named_modules() if name.rpartition(".")[2].startswith(("q", "k", "v"))]
            maps = [one for one in maps if type(one) is nn.Linear]
            if len(maps) == 3 and all(_alike(one, maps[0]) for one in maps):
                found[attention] = [names[one] for one in maps]
    return list(found.values())


def _alike(one: nn.Linear, other: nn.Linear) -> bool:
    """Whether the one can lie below the other."""
    fits = one.out_features % ALIGNED == 0 and one.in_features == other.in_features
    return fits and (one.bias is None) == (other.bias is None)


def trained_forwards(
    model: PreTrainedModel, joined: Iterable[Sequence[str]], leaves: Mapping[str, Leaf], beside: Beside
) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
    """Another forward for every linear map and norm whose weights have leaves, and for those joined."""

    def of(name: str) -> list[Leaf]:
        found = [leaves.get(f"{name}.{part}") for part, _ in model.get_submodule(name).named_parameters(recurse=False)]
        return [leaf for leaf in found if leaf is not None] if None not in found else []

    made: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
    for names in joined:
        maps = [model.get_submodule(name) for name in names]
        made |= Joint(maps, product(of(names[0]), beside)).forwards()  # type: ignore[arg-type]
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module not in made and (own := of(name)):
            made[module] = product(own, beside)
        if type(module) is nn.LayerNorm and len(own := of(name)) == 2:
            made[module] = norm(own, beside, module.eps)
    return made


def frozen_forwards(model: PreTrainedModel) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
    """Another forward for the maps that are joined, of a model that does not train. Its weights become views of theirs
    one below another: nothing is held twice."""
    made: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
    for names in joints(model):
        maps: list[Any] = [model.get_submodule(name) for name in names]
        whole = {}
        for part, _ in maps[0].named_parameters():
            whole[part] = torch.cat([getattr(one, part).detach() for one in maps])
            for one, rows in zip(maps, whole[part].split([one.out_features for one in maps])):
                getattr(one, part).data = rows
        made |= Joint(maps, partial(F.linear, **whole)).forwards()
    return made
