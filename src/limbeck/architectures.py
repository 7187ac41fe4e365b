"""Where each family keeps its blocks, attention and classifier.

A new family is one entry in FAMILIES. Everything else about a model (depth, widths, heads, inputs) is read off it.
"""

import copy
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from limbeck import wide_head
from limbeck.data import kinds
from limbeck.errors import LimbeckError


@dataclass(frozen=True)
class Family:
    """Paths inside a family's models, and what its classifier computes."""

    blocks: str  # the list of blocks, from the base model
    attention: str  # the self-attention, from a block
    # The classifier of every family is output(activation(dense(h))), of the first token's last state h. Kinds of tasks
    # that predict for every token have one linear map instead.
    head: tuple[str, ...]  # what stands between the last block and the predictions, from the whole model
    dense: str  # from the whole model, as the next
    output: str  # one row a label
    activation: str  # empty: the configuration says
    # Of families that do not use transformers' attention interface, from the self-attention: its projections, and what
    # gives its position bias, an argument of its forward or a method.
    projections: tuple[str, str, str] | None = None
    bias: str = ""
    convolution: str = ""  # what some models put between the first block and the second, from the base model
    relative: str = ""  # the method that makes relative positions with copies from the host, from the base model


BERT = Family(
    blocks="encoder.layer",
    attention="attention.self",
    head=("bert.pooler", "classifier"),
    dense="bert.pooler.dense",
    output="classifier",
    activation="tanh",
)
ROBERTA = replace(BERT, head=("classifier",), dense="classifier.dense", output="classifier.out_proj")
FAMILIES = {
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "electra": replace(ROBERTA, activation="gelu"),
    "distilbert": Family(
        blocks="transformer.layer",
        attention="attention",
        head=("pre_classifier", "classifier"),
        dense="pre_classifier",
        output="classifier",
        activation="relu",
    ),
    "mpnet": replace(ROBERTA, attention="attention.attn", projections=("q", "k", "v"), bias="position_bias"),
    "deberta-v2": replace(
        BERT,
        head=("pooler", "classifier"),
        dense="pooler.dense",
        activation="",
        projections=("query_proj", "key_proj", "value_proj"),
        bias="disentangled_attention_bias",
        convolution="encoder.conv",
        relative="encoder.get_rel_pos",
    ),
}
WIDE = "limbeck-"  # before the model type of a family's classifiers whose head is wider than their states
for config_class, model_class in wide_head.CLASSES.items():
    AutoConfig.register(config_class.model_type, config_class)
    AutoModelForSequenceClassification.register(config_class, model_class)


class Shape(NamedTuple):
    """A model's sizes, read off it."""

    layers: int
    width: int
    heads: int
    labels: int
    reads: int = 0  # the width of what the classifier reads


def kind(config: PretrainedConfig) -> str:
    """The model type of the family."""
    return config.model_type.removeprefix(WIDE)


def family(model: PreTrainedModel) -> Family:
    """The family's paths, or an error that says what to add."""
    if kind(model.config) not in FAMILIES:
        raise LimbeckError(
            f'model type "{model.config.model_type}" is not one limbeck knows how to tap. '
            f"Known: {', '.join(sorted(FAMILIES))}. "
            "A new family is one entry in limbeck/architectures.py: the paths of its blocks, self-attention and head."
        )
    found, head = FAMILIES[kind(model.config)], kinds.of(model).head
    return replace(found, head=(head,), dense=head, output=head, activation="none") if head else found


def auto_class(kind: kinds.Kind) -> Any:
    """The class of transformers that makes models for a kind of task."""
    return getattr(transformers, kind.auto)


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


def activation(model: PreTrainedModel) -> str:
    """What the classifier does between its two linear maps."""
    return family(model).activation or model.config.pooler_hidden_act


def output_map(model: PreTrainedModel) -> nn.Linear:
    """The linear map whose rows are the labels."""
    return _last(model.get_submodule(family(model).output))


def dense_map(model: PreTrainedModel) -> nn.Linear:
    """The classifier's first linear map."""
    return _last(model.get_submodule(family(model).dense))


def projector(model: PreTrainedModel) -> nn.Linear | None:
    """The linear map that a student in training may have before a reused classifier."""
    found = model.get_submodule(family(model).dense)
    return _linear(found[0]) if isinstance(found, nn.Sequential) else None


def _last(module: nn.Module) -> nn.Linear:
    """The map itself, behind a projector or not."""
    return _linear(module[1] if isinstance(module, nn.Sequential) else module)


def _linear(module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise LimbeckError(f"a classifier is made of linear maps, and this model's has a {type(module).__name__}.")
    return module


def shape(model: PreTrainedModel) -> Shape:
    """The model's depth, width, heads and labels, and what its classifier reads."""
    config = model.config
    return Shape(
        len(blocks(model)),
        config.hidden_size,
        config.num_attention_heads,
        config.num_labels or 0,
        dense_map(model).in_features,
    )


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
    offset = 2 if kind(config) in ("roberta", "xlm-roberta", "mpnet") else 0
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
    convolution = family(model).convolution.rpartition(".")[2]
    if skip and convolution in inner_view._modules:
        inner_view._modules[convolution] = None  # it belongs to the first block
    return view


def cut_short(model: PreTrainedModel, depth: int) -> PreTrainedModel:
    """The model with a forward that ends after `depth` blocks, with what `shortened` gives. Hooks on the model run too:
    those of a model that is cut over processes gather its weights."""
    view = _shallow(model)
    view._modules[model.base_model_prefix] = view.__dict__["forward"] = shortened(model, depth)
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


def rebuilt(model: PreTrainedModel, blocks: Iterable[nn.Module]) -> PreTrainedModel:
    """The whole model with other blocks, sharing everything else; the original is untouched."""
    *containers, last = family(model).blocks.split(".")
    view = _shallow(model)
    inner: nn.Module = view
    for name in (model.base_model_prefix, *containers):
        inner._modules[name] = _shallow(inner.get_submodule(name))
        inner = inner.get_submodule(name)
    inner._modules[last] = nn.ModuleList(blocks)
    return view


Some = TypeVar("Some", bound=nn.Module)


def _shallow(module: Some) -> Some:
    view = object.__new__(type(module))  # not copy.copy: the class of a sharded module makes another by its __init__
    view.__dict__.update(module.__dict__, _modules=dict(module._modules))
    return view
