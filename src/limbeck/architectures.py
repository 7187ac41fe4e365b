"""Where each family keeps its blocks, attention and classifier.

A new family is one entry in FAMILIES. Everything else about a model (depth, widths, heads, inputs) is read off it.
"""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from limbeck.errors import LimbeckError


@dataclass(frozen=True)
class Family:
    """Paths inside a family's models."""

    blocks: str  # the list of blocks, from the base model
    attention: str  # the self-attention, from a block
    head: tuple[str, ...]  # what stands between the last block and the predictions, from the whole model
    output: str  # the last linear map, one row a label, from the whole model
    # Of families that do not use transformers' attention interface, from the self-attention: its projections, and what
    # gives its position bias, an argument of its forward or a method.
    projections: tuple[str, str, str] | None = None
    bias: str = ""
    convolution: str = ""  # what some models put between the first block and the second, from the base model


BERT = Family("encoder.layer", "attention.self", ("bert.pooler", "classifier"), "classifier")
TWO_LAYER_HEAD = Family("encoder.layer", "attention.self", ("classifier",), "classifier.out_proj")
FAMILIES = {
    "bert": BERT,
    "roberta": TWO_LAYER_HEAD,
    "xlm-roberta": TWO_LAYER_HEAD,
    "electra": TWO_LAYER_HEAD,
    "distilbert": Family("transformer.layer", "attention", ("pre_classifier", "classifier"), "classifier"),
    "mpnet": Family(
        "encoder.layer",
        "attention.attn",
        ("classifier",),
        "classifier.out_proj",
        projections=("q", "k", "v"),
        bias="position_bias",
    ),
    "deberta-v2": Family(
        "encoder.layer",
        "attention.self",
        ("pooler", "classifier"),
        "classifier",
        projections=("query_proj", "key_proj", "value_proj"),
        bias="disentangled_attention_bias",
        convolution="encoder.conv",
    ),
}


class Shape(NamedTuple):
    """A model's sizes, read off it."""

    layers: int
    width: int
    heads: int
    labels: int


def family(model: PreTrainedModel) -> Family:
    """The family's paths, or an error that says what to add."""
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise LimbeckError(
            f'model type "{kind}" is not one limbeck knows how to tap. Known: {", ".join(sorted(FAMILIES))}. '
            "A new family is one entry in limbeck/architectures.py: the paths of its blocks, self-attention and head."
        )
    return FAMILIES[kind]


def blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The model's blocks, in order; block k gives layer k, counted from 1."""
    found = model.base_model.get_submodule(family(model).blocks)
    if not isinstance(found, nn.ModuleList):
        raise LimbeckError(f"{family(model).blocks} of {type(model).__name__} is no list of blocks.")
    return found


def giver(model: PreTrainedModel, layer: int) -> nn.Module:
    """The module whose output is the state of layer k, counted from 1: its block, or the convolution behind it."""
    if layer == 1 and (path := family(model).convolution):
        container, _, name = path.rpartition(".")
        if (convolution := getattr(model.base_model.get_submodule(container), name)) is not None:
            return convolution
    return blocks(model)[layer - 1]


def self_attention(model: PreTrainedModel, layer: int) -> nn.Module:
    """The self-attention of layer k, counted from 1."""
    return blocks(model)[layer - 1].get_submodule(family(model).attention)


def scaling(attention: nn.Module, size: int) -> float:
    """What a self-attention outside transformers' interface multiplies its products by, for heads of this size."""
    # DeBERTa adds up to three products: contents with contents, contents with positions, positions with contents.
    products = 1 + len({"c2p", "p2c"} & set(getattr(attention, "pos_att_type", ())))
    return (size * products) ** -0.5


def head(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Pooler and classifier, by name."""
    return {name: model.get_submodule(name) for name in family(model).head}


def output_map(model: PreTrainedModel) -> nn.Linear:
    """The linear map whose rows are the labels."""
    found = model.get_submodule(family(model).output)
    if not isinstance(found, nn.Linear):
        raise LimbeckError(f"{family(model).output} of {type(model).__name__} is no linear map.")
    return found


def shape(model: PreTrainedModel) -> Shape:
    """The model's depth, width, heads and labels."""
    config = model.config
    return Shape(len(blocks(model)), config.hidden_size, config.num_attention_heads, config.num_labels or 0)


def inputs(model: PreTrainedModel) -> tuple[str, ...]:
    """The token columns the model takes."""
    taken = inspect.signature(model.base_model.forward).parameters
    columns = ["input_ids", "attention_mask"]
    # RoBERTa's forward takes token types, but it has one type only: the tokenizer's 1s would be out of range.
    if "token_type_ids" in taken and getattr(model.config, "type_vocab_size", 0) > 1:
        columns.append("token_type_ids")
    return tuple(columns)


def positions(config: PretrainedConfig) -> int:
    """How many tokens a model has positions for."""
    # These families number positions from behind the padding token.
    offset = 2 if config.model_type in ("roberta", "xlm-roberta", "mpnet") else 0
    return config.max_position_embeddings - offset


def shortened(model: PreTrainedModel, depth: int, *, skip: int = 0) -> nn.Module:
    """The base model with its first `depth` blocks, less the first `skip`, and no pooler.

    It shares every weight; the original is untouched.
    """
    base = model.base_model
    view = _shallow(base)
    *containers, last = family(model).blocks.split(".")
    inner, inner_view = base, view
    for name in containers:
        inner, copied = inner.get_submodule(name), _shallow(inner.get_submodule(name))
        inner_view._modules[name] = copied
        inner_view = copied
    inner_view._modules[last] = nn.ModuleList(blocks(model)[skip:depth])
    if "pooler" in view._modules:
        view._modules["pooler"] = None
    return view


def copied_blocks(model: PreTrainedModel, first: int, last: int) -> nn.Module:
    """A copy of blocks `first` to `last`: a base model that takes states (`inputs_embeds`) and has no embeddings.

    The family's own forward runs, and makes the mask and position bias its blocks want.
    """
    view = shortened(model, last, skip=first - 1)
    for name in ("embeddings", "embeddings_project"):  # the second is ELECTRA's
        if name in view._modules:
            view._modules[name] = _HandOn()
    return copy.deepcopy(view)


def same_blocks(student: PreTrainedModel, ours: Sequence[int], teacher: PreTrainedModel, theirs: Sequence[int]) -> bool:
    """Whether these layers of the student hold, each, the weights of these of the teacher."""
    return len(ours) == len(theirs) and all(
        min(s, t) > 0 and _same(blocks(student)[s - 1], blocks(teacher)[t - 1]) for s, t in zip(ours, theirs)
    )


class _HandOn(nn.Module):
    """Stands where embeddings stood, and hands on the states it is given."""

    def forward(self, *args: Tensor | None, inputs_embeds: Tensor | None = None, **_: object) -> Tensor:
        return next(given for given in (inputs_embeds, *args) if given is not None)


def _same(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name].cpu(), theirs[name].cpu()) for name in ours)


def _shallow(module: nn.Module) -> nn.Module:
    view = copy.copy(module)
    view._modules = dict(module._modules)
    return view
