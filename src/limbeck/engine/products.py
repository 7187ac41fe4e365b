"""Linear maps, norms and embeddings as they run while a student trains in half precision.

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

from limbeck import architectures, kernels
from limbeck.engine.beside import Beside
from limbeck.engine.forks import Forks

ALIGNED = 8  # numbers of two bytes that a wide load takes
SMALL = 1024  # rows of a table: up to here its gradient is a matrix product
MANY = 1 << 24  # numbers that one factor of it may have


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

    def target(self) -> tuple[Tensor, bool]:
        """Where a gradient is to be written, and whether added to what is there. It counts as written from now on."""
        before, self.written = self.written, True
        return self.gradient, before

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """A gradient that is a matrix product."""
        gradient, add = self.target()
        if add:
            gradient.addmm_(left, right)
        else:
            torch.mm(left, right, out=gradient)

    def add_sum(self, rows: Tensor) -> None:
        """A gradient that is a sum of rows."""
        if (sums := sums_for(rows)) and sums.worth(rows):
            sums.add_columns(rows, *self.target())
            return
        gradient, add = self.target()
        if add:
            gradient.add_(rows.sum(0))
        else:
            torch.sum(rows, 0, out=gradient)

    def add(self, found: Tensor) -> None:
        """A gradient."""
        gradient, add = self.target()
        (gradient.add_ if add else gradient.copy_)(found)

    def begin(self) -> Tensor:
        """The gradient, to be added to: 0 unless something is there already."""
        gradient, begun = self.target()
        return gradient if begun else gradient.zero_()


def sums_for(like: Tensor) -> Any:
    """sums.py, which adds up tensors like this one; None where it cannot."""
    if not (kernels.run_on(like.device) and like.dtype == torch.bfloat16):
        return None
    from limbeck.engine import sums

    return sums


class Product(torch.autograd.Function):
    """`F.linear`, whose weights' gradients go to their leaves."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, leaves: Sequence[Leaf], beside: Beside, forks: Forks
    ):
        ctx.save_for_backward(x, weight)
        ctx.leaves, ctx.beside, ctx.fork = leaves, beside, forks.open(x)
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
        return ctx.fork.product(given[0], weight) if ctx.needs_input_grad[0] else None, None, None, None, None, None


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
    with beside(above, x, mean, rstd):
        gradients, rows = (tensor.reshape(-1, weights[0].numel()) for tensor in (above, x))
        if (sums := sums_for(x)) and sums.worth(gradients) and sums.worth(rows):
            sums.add_norm(gradients, rows, mean, rstd, *(leaf.target() for leaf in leaves))
            return
        back = torch.ops.aten.native_layer_norm_backward
        found = back(above, x, weights[0].shape, mean, rstd, *weights, [False, True, True])[1:]
        for leaf, gradient in zip(leaves, found):
            leaf.add(gradient)


class Embedding(torch.autograd.Function):
    """`F.embedding`, whose table's gradient goes to its leaf.

    What needs no gradient, ids in order and a gradient of zeros, is made beside the forward. Not the zeros where a
    linear map shares the table: it comes first in the backward, and writes without reading.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, leaf: Leaf, beside: Beside, padding: int, shared: bool):
        ctx.leaf, ctx.beside, ctx.padding, found = leaf, beside, padding, ()
        if len(weight) > SMALL and (sums := sums_for(weight)):
            with beside(ids):
                found = sums.segments(ids)
                if not shared:
                    leaf.begin()
        ctx.save_for_backward(ids, *found)
        return F.embedding(ids, weight, padding if padding >= 0 else None)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[None, ...]:
        """Nothing: the gradient of the table is written."""
        ids, *found = ctx.saved_tensors
        leaf, size = ctx.leaf, len(ctx.leaf.gradient)
        with ctx.beside(given[0], ids):
            rows, sums = given[0].reshape(-1, given[0].shape[-1]), sums_for(given[0])
            if sums is None or (size <= SMALL and size * ids.numel() > MANY):
                leaf.add(torch.ops.aten.embedding_dense_backward(given[0], ids, size, ctx.padding, False))
            elif size <= SMALL:
                places = torch.arange(size, device=ids.device)[:, None]
                chosen = (ids.flatten() == places) & (places != ctx.padding)
                leaf.add_product(chosen.to(rows.dtype), rows)
            else:
                sums.add_by_id(rows.contiguous(), found, leaf.begin(), ctx.padding)
        return None, None, None, None, None, None


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


def product(leaves: Sequence[Leaf], beside: Beside, forks: Forks) -> Callable[[Tensor], Tensor]:
    """A linear map by these weights."""
    weight, bias = leaves[0].tensor, leaves[1].tensor if len(leaves) > 1 else None
    return lambda x: Product.apply(x, weight, bias, leaves, beside, forks)  # type: ignore[return-value]


def norm(leaves: Sequence[Leaf], beside: Beside, eps: float) -> Callable[[Tensor], Tensor]:
    """A norm by these weights."""
    weight, bias = (leaf.tensor for leaf in leaves)
    return lambda x: Norm.apply(x, weight, bias, leaves, beside, eps)  # type: ignore[return-value]


def embedding(leaf: Leaf, beside: Beside, padding: int | None, shared: bool) -> Callable[[Tensor], Tensor]:
    """A look-up in this table, which a linear map may share."""
    left_out = -1 if padding is None else padding
    return lambda ids: Embedding.apply(ids, leaf.tensor, leaf, beside, left_out, shared)  # type: ignore[return-value]


def joints(model: PreTrainedModel) -> list[list[str]]:
    """The names of the maps that are given the same input: queries, keys and values of every self-attention, in the
    order they are asked, which is not always that in which the model has them."""
    names = {module: name for name, module in model.named_modules()}
    found: dict[nn.Module, list[str]] = {}
    for side in architectures.sides(model):
        for layer in range(1, architectures.shape(model).at(side).layers + 1):
            attention = architectures.attention(model, layer, side)
            linear = [one for one in attention.named_modules() if type(one[1]) is nn.Linear]
            maps: list[Any] = [m for part in "qkv" for name, m in linear if name.rpartition(".")[2].startswith(part)]
            if len(maps) == 3 and all(_alike(one, maps[0]) for one in maps):
                found[attention] = [names[one] for one in maps]
    return list(found.values())


def _alike(one: nn.Linear, other: nn.Linear) -> bool:
    """Whether the one can lie below the other."""
    fits = one.out_features % ALIGNED == 0 and one.in_features == other.in_features
    return fits and (one.bias is None) == (other.bias is None)


def trained_forwards(
    model: PreTrainedModel,
    joined: Iterable[Sequence[str]],
    leaves: Mapping[str, Leaf],
    beside: Beside,
    forks: Forks,
) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
    """Another forward for every linear map, norm and embedding whose weights have leaves, and for those joined."""
    known = {weight: leaves[name] for name, weight in model.named_parameters() if name in leaves}

    def of(module: nn.Module, sharing: int = 1) -> list[Leaf]:
        """The leaves of all its weights, under whatever name: a head may share the embeddings' table. So many weights
        have to lie in each of them, lest a map that shares a weight with one joined be taken for all of these."""
        found = [known.get(weight) for weight in module.parameters(recurse=False)]
        leaves = [leaf for leaf in found if leaf is not None and len(leaf.names) == sharing]
        return leaves if len(leaves) == len(found) else []

    made: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
    for names in joined:
        maps: list[Any] = [model.get_submodule(name) for name in names]
        made |= Joint(maps, product(of(maps[0], len(maps)), beside, forks)).forwards()
    for module in model.modules():
        if type(module) is nn.Linear and module not in made and (own := of(module)):
            made[module] = product(own, beside, forks)
        if type(module) is nn.LayerNorm and len(own := of(module)) == 2:
            made[module] = norm(own, beside, module.eps)
    multiplied = {leaf for module in made if type(module) is nn.Linear for leaf in of(module)}
    for module in model.modules():
        if type(module) is nn.Embedding and _plain(module) and (own := of(module)):
            made[module] = embedding(own[0], beside, module.padding_idx, own[0] in multiplied)
    return made


def _plain(module: nn.Embedding) -> bool:
    """Whether it looks up rows and does no more."""
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


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
