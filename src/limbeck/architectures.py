"""Where each family keeps its blocks, attention and classifier.

A new family is one entry in FAMILIES. Everything else about a model (depth, widths, heads, inputs) is read off it.
"""

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

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
    # The classifier of every family is output(activation(dense(h))), of the state h that it reads; where dense and
    # output are one path, it is one linear map, as in all kinds of tasks that predict for every token.
    head: tuple[str, ...]  # what stands between the last state and the predictions, from the whole model
    dense: str  # from the whole model, as the next
    output: str  # one row a label
    words: str = ""  # the output embeddings of its masked language models, from the whole model
    activation: str = ""  # its name, or that of the setting which says it
    after: str = ""  # a norm behind the activation, from the whole model
    reads: str = "first"  # the token the classifier reads: the first or the last; or the setting which says it
    embeddings: tuple[str, ...] = ("embeddings",)  # what makes the state the first block takes, from the base model
    norm: str = ""  # behind the last block, from the base model
    # Of families with an encoder and a decoder, from a block of the decoder: what attends to the encoder. The paths
    # above are the decoder's, and the encoder's have "encoder" for "decoder".
    cross: str = ""
    shared: bool = False  # whether all layers are one block
    # Of families that do not use transformers' attention interface, from the self-attention: its projections, and what
    # gives its position bias, an argument of its forward or a method.
    projections: tuple[str, str, str] | None = None
    bias: str = ""
    convolution: str = ""  # what some models put between the first block and the second, from the base model
    relative: str = ""  # the method that makes relative positions, for some versions on the host, from the base model


BERT = Family(
    blocks="encoder.layer",
    attention="attention.self",
    head=("bert.pooler", "classifier"),
    dense="bert.pooler.dense",
    output="classifier",
    words="cls.predictions.decoder",
    activation="tanh",
)
ROBERTA = replace(
    BERT, head=("classifier",), dense="classifier.dense", output="classifier.out_proj", words="lm_head.decoder"
)
LLAMA = Family(
    blocks="layers",
    attention="self_attn",
    head=("score",),
    dense="score",
    output="score",
    reads="last",
    embeddings=("embed_tokens",),
    norm="norm",
)
BART = Family(
    blocks="decoder.layers",
    attention="self_attn",
    head=("lm_head",),
    dense="lm_head",
    output="lm_head",
    reads="last",
    embeddings=("shared", "decoder.embed_tokens", "decoder.embed_positions", "decoder.layernorm_embedding"),
    cross="encoder_attn",
)
T5 = replace(
    BART,
    blocks="decoder.block",
    attention="layer.0.SelfAttention",
    embeddings=("shared", "decoder.embed_tokens"),
    norm="decoder.final_layer_norm",
    cross="layer.1.EncDecAttention",
)
FAMILIES = {
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "electra": replace(
        ROBERTA, words="generator_lm_head", activation="gelu", embeddings=("embeddings", "embeddings_project")
    ),
    "distilbert": Family(
        blocks="transformer.layer",
        attention="attention",
        head=("pre_classifier", "classifier"),
        dense="pre_classifier",
        output="classifier",
        words="vocab_projector",
        activation="relu",
    ),
    "mpnet": replace(
        ROBERTA,
        attention="attention.attn",
        projections=("q", "k", "v"),
        bias="position_bias",
        relative="encoder.relative_position_bucket",
    ),
    "deberta-v2": replace(
        BERT,
        head=("pooler", "classifier"),
        dense="pooler.dense",
        activation="pooler_hidden_act",
        projections=("query_proj", "key_proj", "value_proj"),
        bias="disentangled_attention_bias",
        convolution="encoder.conv",
        relative="encoder.get_rel_pos",
    ),
    "albert": replace(
        BERT,
        blocks="encoder.albert_layer_groups",
        attention="albert_layers.0.attention",
        head=("albert.pooler", "classifier"),
        dense="albert.pooler",
        words="predictions.decoder",
        embeddings=("embeddings", "encoder.embedding_hidden_mapping_in"),
        shared=True,
    ),
    "modernbert": Family(
        blocks="layers",
        attention="attn",
        head=("head", "classifier"),
        dense="head.dense",
        output="classifier",
        words="decoder",
        activation="classifier_activation",
        after="head.norm",
        reads="classifier_pooling",
        norm="final_norm",
    ),
    "gpt2": replace(LLAMA, blocks="h", attention="attn", embeddings=("wte", "wpe", "drop"), norm="ln_f"),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), LLAMA),
    **dict.fromkeys(("t5", "mt5"), T5),
    **dict.fromkeys(("bart", "marian"), BART),
    **dict.fromkeys(("mbart", "pegasus"), replace(BART, norm="decoder.layer_norm")),
}
# Of a model with two stacks of layers: the one it is asked for where none is named, the other, and the attention from
# the one to the other. A model with one stack has the first alone, whatever it is.
Side = Literal["decoder", "encoder", "cross"]
Pooling = Literal["first", "last", "mean"]
ONE_MAP = "one linear map"
# These number positions from behind the padding token.
BEHIND_PADDING = (
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "roberta-prelayernorm",
    "camembert",
    "data2vec-text",
    "mpnet",
)
WIDE = "limbeck-"  # before the model type of a family's classifiers whose head is wider than their states
for config_class, model_class in wide_head.CLASSES.items():
    AutoConfig.register(config_class.model_type, config_class)
    AutoModelForSequenceClassification.register(config_class, model_class)


Size = Literal["width", "reads", "labels"]


class Shape(NamedTuple):
    """A model's sizes, read off it."""

    layers: int
    width: int
    heads: int
    labels: int
    reads: int = 0  # the width of what the classifier reads
    encoder: "Shape | None" = None  # of a model with two stacks, whose decoder's sizes the others are
    head_size: int | None = None  # if it is not said, heads add up to the width

    @property
    def attends(self) -> int:
        """The width of all heads together."""
        return self.heads * self.head_size if self.head_size else self.width

    def size(self, of: Size) -> int:
        """One of the sizes that vectors of a model have."""
        return {"width": self.width, "reads": self.reads, "labels": self.labels}[of]

    def at(self, side: Side) -> "Shape":
        """The sizes of one of its sides."""
        if side == "decoder":
            return self
        if self.encoder is None:
            raise LimbeckError(
                f"side={side} is asked for, and a model has one stack of layers. Leave side out: it is for models with "
                "an encoder and a decoder, such as T5."
            )
        return self.encoder if side == "encoder" else self


def model_type(config: PretrainedConfig) -> str:
    """The model type of the family, also of a classifier with a wider head."""
    return config.model_type.removeprefix(WIDE)


def has_wide_head(config: PretrainedConfig) -> bool:
    """Whether the family has a classifier whose head is wider than its states."""
    return f"{WIDE}{model_type(config)}" in {known.model_type for known in wide_head.CLASSES}


def family(model: PreTrainedModel, side: Side = "decoder") -> Family:
    """The family's paths on a side, or an error that says what to add."""
    known = FAMILIES.get(model_type(model.config)) or _like_llama(model) or _like_bert(model)
    if known is None:
        raise LimbeckError(
            f'model type "{model.config.model_type}" is not one limbeck knows how to tap. '
            f"Known: {', '.join(sorted(FAMILIES))}, and what is laid out as Llama or BERT is. "
            "A new family is one entry in limbeck/architectures.py: the paths of its blocks, self-attention and head."
        )
    task = kinds.of(model)
    if known.cross and task.name != "seq2seq":
        raise LimbeckError(
            f"a model of type {model.config.model_type} answers with a text, and this is a {task.name} task. Give its "
            "labels as words and add --kind seq2seq, or give a model that has an encoder alone."
        )
    if task.bare:
        return replace(known, head=(), dense="", output="")
    head = known.words if task.masked else task.head
    if head and not all(_has(model, path) for path in (known.dense, known.output)):  # ModernBERT's serves every kind
        known = replace(known, head=(head,), dense=head, output=head, activation="none", after="")
    return known if side == "decoder" else _on_side(known, side)


def _has(model: nn.Module, path: str) -> bool:
    place: Any = model
    for name in path.split("."):
        place = getattr(place, name, None)
    return place is not None


def _on_side(known: Family, side: Side) -> Family:
    if side == "cross":
        return replace(known, attention=known.cross)
    there = {name: getattr(known, name).replace("decoder", "encoder") for name in ("blocks", "norm")}
    paths = tuple(path.replace("decoder", "encoder") for path in known.embeddings)
    return replace(known, embeddings=paths, reads="first", **there)


def sides(model: PreTrainedModel) -> tuple[Side, ...]:
    """The stacks of layers a model has; the one with the predictions first."""
    return ("decoder", "encoder") if family(model).cross else ("decoder",)


def auto_class(kind: kinds.Kind) -> Any:
    """The class of transformers that makes models for a kind of task."""
    return getattr(transformers, kind.auto)


def made_with(config: Any) -> dict[str, str]:
    """What a model has to be made with to attend as it learned to: SDPA leaves out the cap some put on their scores."""
    return {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}


def configs(model: PreTrainedModel) -> list[Any]:
    """The model's configuration, and those of its parts: each stack of T5 has a copy of its own."""
    found = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    return list({id(config): config for config in found}.values())


@contextmanager
def attending_by(configs: Sequence[Any], implementation: str) -> Iterator[None]:
    """In here models of these configurations attend by that implementation."""
    native = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = implementation
    try:
        yield
    finally:
        for config, own in zip(configs, native):
            config._attn_implementation = own


def _like_llama(model: PreTrainedModel) -> Family | None:
    """The paths of a model of no known type: one list of equal blocks, each with one self-attention that goes by
    transformers' attention interface, behind it a norm, and one linear map for a classifier."""
    base = model.base_model
    inside = dict(base.named_children())
    path, stack = next((f"{name}.", module) for name, module in inside.items()) if len(inside) == 1 else ("", base)
    lists = [(path + name, list(m)) for name, m in stack.named_children() if isinstance(m, nn.ModuleList) and len(m)]
    outputs = [name for name, m in model.named_children() if m is not base and isinstance(m, nn.Linear)]
    outputs = [""] if base is model else outputs
    norms = [path + name for name, m in stack.named_children() if "Norm" in type(m).__name__]
    tables = tuple(path + name for name, m in stack.named_children() if isinstance(m, nn.Embedding))
    once = all(len(found) == 1 for found in (lists, outputs, norms))
    if not (once and tables and model._supports_attention_backend):
        return None
    (place, found), (output,), (norm,) = lists[0], outputs, norms
    attentions = [name for name, m in found[0].named_children() if "Attention" in type(m).__name__]
    if len(attentions) != 1 or len({type(block) for block in found}) != 1:
        return None
    causal = getattr(found[0].get_submodule(attentions[0]), "is_causal", False)
    return Family(
        place,
        attentions[0],
        (output,),
        output,
        output,
        reads="last" if causal else "first",
        embeddings=tables,
        norm=norm,
    )


def _like_bert(model: PreTrainedModel) -> Family | None:
    """The paths of an encoder of no known type whose modules are called as BERT's or RoBERTa's are, as CamemBERT's, and
    attend by transformers' interface; it may have a norm behind its last block."""
    base = dict(model.base_model.named_children())
    stack = dict(base["encoder"].named_children()) if "encoder" in base else {}
    parts = {**base, **{f"encoder.{name}": module for name, module in stack.items()}}
    norms = [name for name, module in parts.items() if isinstance(module, nn.LayerNorm)]
    needed = {"embeddings", "encoder", "encoder.layer"}
    if parts.keys() - {"pooler", *norms} != needed or not model._supports_attention_backend:
        return None
    found = list(stack["layer"].children())
    decodes = getattr(model.config, "is_decoder", False) or kinds.of(model).name == "causal-lm"
    if decodes or not (found and all(_has(block, BERT.attention) for block in found)):
        return None
    like = replace(BERT if "pooler" in base or _has(model, BERT.words) else ROBERTA, norm=norms[0] if norms else "")
    pooler = f"{model.base_model_prefix}.pooler"
    return replace(like, head=(pooler, "classifier"), dense=f"{pooler}.dense") if "pooler" in base else like


def blocks(model: PreTrainedModel, side: Side = "decoder") -> nn.ModuleList:
    """The model's blocks, in order; block k gives layer k, counted from 1. Where layers are shared, all are one."""
    known = family(model, side)
    found = model.base_model.get_submodule(known.blocks)
    if not isinstance(found, nn.ModuleList):
        raise LimbeckError(f"{known.blocks} of {type(model).__name__} is no list of blocks.")
    if not known.shared:
        return found
    config = model.config
    if config.num_hidden_groups != 1 or config.inner_group_num != 1:
        raise LimbeckError(
            f"this {config.model_type} has {config.num_hidden_groups} groups of {config.inner_group_num} blocks. "
            "Only those whose layers are all one block are known, as every published one is."
        )
    return nn.ModuleList([found[0]] * config.num_hidden_layers)


def every_block(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks of all sides, each once."""
    return list(dict.fromkeys(block for side in sides(model) for block in blocks(model, side)))


def droppers(model: PreTrainedModel) -> list[nn.Module]:
    """The stacks that leave out whole layers at random while they train (LayerDrop)."""
    return [module for module in model.modules() if getattr(module, "layerdrop", 0)]


def block_names(model: PreTrainedModel) -> tuple[str, ...]:
    """What the names of the blocks' weights begin with."""
    return tuple(f"{base_path(model)}{family(model, side).blocks}." for side in sides(model))


def norm_names(model: PreTrainedModel) -> tuple[str, ...]:
    """What the names of the weights behind the last blocks begin with."""
    paths = [family(model, side).norm for side in sides(model)]
    return tuple(f"{base_path(model)}{path}." for path in paths if path)


def giver(model: PreTrainedModel, layer: int, side: Side = "decoder") -> nn.Module:
    """The module whose output is the state of layer k, counted from 1: its block, or the convolution behind it."""
    if layer == 1 and (path := family(model).convolution):
        container, _, name = path.rpartition(".")
        if (convolution := getattr(model.base_model.get_submodule(container), name)) is not None:
            return convolution
    return blocks(model, side)[layer - 1]


def attention(model: PreTrainedModel, layer: int, side: Side = "decoder") -> nn.Module:
    """The self-attention of layer k, counted from 1, or what attends to the encoder there."""
    return blocks(model, side)[layer - 1].get_submodule(family(model, side).attention)


def scaling(attention: nn.Module, size: int) -> float:
    """What a self-attention outside transformers' interface multiplies its products by, for heads of this size."""
    # DeBERTa adds up to three products: contents with contents, contents with positions, positions with contents.
    products = 1 + len({"c2p", "p2c"} & set(getattr(attention, "pos_att_type", ())))
    return (size * products) ** -0.5


def base_path(model: PreTrainedModel) -> str:
    """Where the base model stands in the whole one: the beginning of its weights' names."""
    return "" if model.base_model is model else f"{model.base_model_prefix}."


def head(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Pooler and classifier, by name."""
    return {name: model.get_submodule(name) for name in family(model).head}


def classifier_form(model: PreTrainedModel) -> str:
    """What the classifier computes, in words."""
    known = family(model)
    if known.dense == known.output:
        return ONE_MAP
    name = getattr(model.config, known.activation, known.activation)
    return f"a {name}{' and a norm' if known.after else ''} between two linear maps"


def pooling(model: PreTrainedModel, side: Side = "decoder") -> Pooling:
    """What of the last states the classifier reads; of an encoder beside a decoder, the first."""
    found = getattr(model.config, family(model, side).reads, family(model, side).reads)
    return "first" if found == "cls" else found  # type: ignore[return-value]


def final_norm(model: PreTrainedModel, side: Side = "decoder") -> nn.Module | None:
    """What norms the last block's states, in models that do that outside of blocks."""
    path = family(model, side).norm
    return model.base_model.get_submodule(path) if path else None


def output_map(model: PreTrainedModel) -> nn.Linear:
    """The linear map whose rows are the labels."""
    return _linear(model.get_submodule(family(model).output))


def output_bias(model: PreTrainedModel) -> Tensor | None:
    """What is added to what that map gives: its own bias, or the one BART has beside it."""
    beside = getattr(model, "final_logits_bias", None)
    return output_map(model).bias if beside is None else beside[0]


def dense_map(model: PreTrainedModel) -> nn.Linear:
    """The classifier's first linear map."""
    return _linear(model.get_submodule(family(model).dense))


def projector(model: PreTrainedModel) -> nn.Linear | None:
    """The linear map that a student in training may have before a reused classifier."""
    found = model.get_submodule(family(model).dense)
    return _linear(found[0]) if isinstance(found, nn.Sequential) else None


def _linear(module: nn.Module) -> nn.Linear:
    if isinstance(module, nn.Sequential):  # a projector, and the map it feeds
        return _linear(module[1])
    if not isinstance(module, nn.Linear):
        raise LimbeckError(f"a classifier is made of linear maps, and this model's has a {type(module).__name__}.")
    return module


def shape(model: PreTrainedModel) -> Shape:
    """The model's depth, width, heads and labels, and what its classifier reads."""
    config, bare = model.config, not family(model).output
    sizes = Shape(
        len(blocks(model)),
        config.hidden_size,
        getattr(config, "decoder_attention_heads", config.num_attention_heads),
        0 if bare else output_map(model).out_features,
        config.hidden_size if bare else dense_map(model).in_features,
        head_size=getattr(config, "head_dim", None) or getattr(config, "d_kv", None),  # T5 has its own name for it
    )
    if "encoder" not in sides(model):
        return sizes
    encoder = sizes._replace(layers=len(blocks(model, "encoder")), heads=config.num_attention_heads)
    return sizes._replace(encoder=encoder)


def inputs(model: PreTrainedModel) -> tuple[str, ...]:
    """The token columns the model takes."""
    taken = inspect.signature(model.base_model.forward).parameters
    columns = ["input_ids", "attention_mask"]
    # RoBERTa's forward takes token types, but it has one type only: the tokenizer's 1s would be out of range.
    if "token_type_ids" in taken and getattr(model.config, "type_vocab_size", 0) > 1:
        columns.append("token_type_ids")
    if "decoder_attention_mask" in taken:
        columns.append("decoder_attention_mask")
    return tuple(columns)


def arguments(model: Any, batch: Mapping[str, Any], columns: Iterable[str] | None = None) -> dict[str, Any]:
    """What of a batch the model's forward takes. A decoder beside an encoder reads the labels, one token late."""
    wanted = tuple(columns or inputs(model))
    given = {name: batch[name] for name in wanted if name in batch}
    if "decoder_attention_mask" in wanted:
        given["decoder_attention_mask"] = target_mask(batch)
        given["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    return given


def target_mask(batch: Mapping[str, Any]) -> Tensor:
    """1 where there is a token to be written: as the batch says, or wherever it has a label."""
    mask = batch.get("decoder_attention_mask")
    return (batch["labels"] != kinds.IGNORE).long() if mask is None else mask


def positions(config: PretrainedConfig) -> int:
    """How many tokens a model has positions for."""
    offset = 2 if model_type(config) in BEHIND_PADDING else 0
    return getattr(config, "max_position_embeddings", sys.maxsize) - offset  # T5's are relative


def keep_layers(config: PretrainedConfig, layers: Sequence[int], side: Side = "decoder") -> None:
    """Have a configuration describe a model of these layers, counted from 1."""
    for name in ("layer_types", "mlp_layer_types"):
        if types := getattr(config, name, None):
            setattr(config, name, [types[(layer - 1) % len(types)] for layer in layers])
    setattr(config, _depth_name(config, side), len(layers))


def depth(config: PretrainedConfig, side: Side = "decoder") -> int:
    """How many layers a configuration describes."""
    return getattr(config, _depth_name(config, side))


def _depth_name(config: PretrainedConfig, side: Side) -> str:
    names = ("num_decoder_layers", "decoder_layers") if side == "decoder" and config.is_encoder_decoder else ()
    return next((name for name in names if hasattr(config, name)), "num_hidden_layers")


def same_blocks(student: PreTrainedModel, ours: Sequence[int], teacher: PreTrainedModel, theirs: Sequence[int]) -> bool:
    """Whether these layers of the student hold, each, the weights of these of the teacher."""
    return len(ours) == len(theirs) and all(
        min(s, t) > 0 and _same(blocks(student)[s - 1], blocks(teacher)[t - 1]) for s, t in zip(ours, theirs)
    )


def _same(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name].cpu(), theirs[name].cpu()) for name in ours)
