"""A model in part: fewer of its blocks, others in their place, or no output map.

A part shares the weights of the whole (`copied_blocks` has copies), which is untouched, and runs the forward of its
family.
"""

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from limbeck.architectures import Side, blocks, family, keep_layers
from limbeck.errors import LimbeckError


def shortened(model: PreTrainedModel, depth: int, *, skip: int = 0, side: Side = "decoder") -> nn.Module:
    """The base model with its first `depth` blocks, less the first `skip`, and no pooler; or so its encoder alone.

    It shares every weight; the original is untouched.
    """
    view, container = _with_blocks(model, blocks(model, side)[skip:depth], side)
    if side == "encoder":
        return container
    if "pooler" in view._modules:
        view._modules["pooler"] = None
    if model.base_model is model and "lm_head" in view._modules:  # T5
        view._modules["lm_head"] = nn.Identity()
    convolution = family(model).convolution.rpartition(".")[2]
    if skip and convolution in container._modules:
        container._modules[convolution] = None  # it belongs to the first block
    return view


def cut_short(model: PreTrainedModel, depth: int, side: Side = "decoder") -> PreTrainedModel:
    """The model with a forward that ends after `depth` blocks, with what `shortened` gives. Hooks on the model run too:
    those of a model that is cut over processes gather its weights."""
    view, inner = _shallow(model), shortened(model, depth, side=side)
    view._modules[model.base_model_prefix], view.__dict__["forward"] = inner, inner.forward
    return view


def handing_on(model: PreTrainedModel) -> tuple[PreTrainedModel, nn.Module]:
    """The model without its output map; and what stands there instead, which is given what the map would be given."""
    view = inner = _shallow(model)
    *containers, last = family(model).output.split(".")
    for name in containers:
        inner._modules[name] = inner = _shallow(inner.get_submodule(name))
    inner._modules[last] = aside = _Aside()
    return view, aside


class _Aside(nn.Module):
    """Stands where an output map stood: gives one number, for the model to scale, bend or add a bias to in vain."""

    def forward(self, states: Tensor) -> Tensor:
        return states[:1, :1, :1]


def copied_blocks(model: PreTrainedModel, first: int, last: int) -> nn.Module:
    """A copy of blocks `first` to `last`: a base model that takes states (`inputs_embeds`) and has no embeddings.

    The family's own forward runs, and makes the mask and position bias its blocks want. There is no final norm: what
    comes out is what the last block returns.
    """
    known, view = family(model), shortened(model, last, skip=first - 1)
    if known.cross:
        raise LimbeckError(
            f"blocks of a model of type {model.config.model_type} cannot be copied into filters: they attend to an "
            "encoder. Use filters(linear) or filters(mlp)."
        )
    for path in known.embeddings:
        if path.rpartition(".")[2] in view.get_submodule(path.rpartition(".")[0])._modules:
            view.set_submodule(path, _HandOn())
    if known.norm:
        view.set_submodule(known.norm, nn.Identity())
    copied: Any = copy.deepcopy(view)
    copied.config.use_cache = False
    keep_layers(copied.config, range(first, last + 1))
    return copied


class _HandOn(nn.Module):
    """Stands where embeddings stood: hands on the states it is given, and makes nothing of positions."""

    def forward(self, *args: Tensor | None, inputs_embeds: Tensor | None = None, **_: object) -> Tensor:
        given = next(given for given in (inputs_embeds, *args) if given is not None)
        return given if given.is_floating_point() else given.new_zeros(())


def rebuilt(model: PreTrainedModel, blocks: Iterable[nn.Module]) -> PreTrainedModel:
    """The whole model with other blocks, sharing everything else; the original is untouched."""
    base, _ = _with_blocks(model, blocks)
    view = _shallow(model)
    if model.base_model is model:
        view._modules = base._modules
    else:
        view._modules[model.base_model_prefix] = base
    return view


def _with_blocks(
    model: PreTrainedModel, blocks: Iterable[nn.Module], side: Side = "decoder"
) -> tuple[nn.Module, nn.Module]:
    """The base model with other blocks, sharing everything else; and that part of it which holds them."""
    known, view = family(model, side), _shallow(model.base_model)
    *containers, last = known.blocks.split(".")
    inner: nn.Module = view
    for name in containers:
        inner._modules[name] = _shallow(inner.get_submodule(name))
        inner = inner.get_submodule(name)
    inner._modules[last] = laid = nn.ModuleList(blocks)
    if known.shared:  # each a group of its own: then the family's forward takes one after the other
        config = copy.copy(model.config)
        config.num_hidden_layers = config.num_hidden_groups = len(laid)
        inner.__dict__["config"] = config
    return view, inner


Some = TypeVar("Some", bound=nn.Module)


def _shallow(module: Some) -> Some:
    view = object.__new__(type(module))  # not copy.copy: the class of a sharded module makes another by its __init__
    view.__dict__.update(module.__dict__, _modules=dict(module._modules))
    return view
