"""Models of every family small enough to run in a millisecond, and batches for them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, PreTrainedModel

from limbeck.architectures import FAMILIES, made_with

VOCABULARY = 100
# What DeBERTa's third version has; the defaults of its configuration are those of the first.
DEBERTA = {
    "relative_attention": True,
    "position_buckets": 4,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
}

# Windows shorter than the texts of a tiny batch, layers of several types, heads that share keys and values, heads whose
# widths do not add up to the model's.
GROUPED = {"num_key_value_heads": 2, "attention_dropout": 0.1}
SPECIAL = {
    "deberta-v2": DEBERTA,
    "roberta": {"type_vocab_size": 1},  # as their checkpoints have it, unlike the default of their configuration
    "xlm-roberta": {"type_vocab_size": 1},
    "gpt2": {"n_inner": 64},
    "albert": {"hidden_dropout_prob": 0.1},
    "modernbert": {"local_attention": 4, "mlp_dropout": 0.1},
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": 3},
    "qwen2": GROUPED | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    "qwen3": GROUPED | {"head_dim": 12},
    "gemma": GROUPED | {"num_key_value_heads": 1, "head_dim": 8},
    "gemma2": GROUPED | {"head_dim": 8, "sliding_window": 3, "attn_logit_softcapping": 2.0},
    "gemma3_text": GROUPED | {"head_dim": 8, "sliding_window": 3, "sliding_window_pattern": 2},
}

two_sided = tuple(name for name, family in FAMILIES.items() if family.cross)  # an encoder and a decoder
every_family = tuple(name for name in FAMILIES if name not in two_sided)
causal = tuple(name for name in every_family if FAMILIES[name].reads == "last")
pre_norm = tuple(name for name in every_family if FAMILIES[name].norm)


def tiny_model(
    family: str = "bert",
    layers: int = 4,
    width: int = 32,
    heads: int = 4,
    labels: int = 3,
    seed: int = 0,
    auto: type = AutoModelForSequenceClassification,
    **options,
) -> PreTrainedModel:
    """A model that `auto` makes, in eval mode. Its weights are drawn large, biases too, so that no two heads or layers
    are alike."""
    if family == "distilbert":
        sizes = {"dim": width, "n_layers": layers, "n_heads": heads, "hidden_dim": 64}
    else:
        sizes = {
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": 64,
        }
    if family in ("electra", "albert"):
        sizes["embedding_size"] = width // 2
    sizes |= SPECIAL.get(family, {})
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    config = AutoConfig.for_model(
        family,
        **{"vocab_size": VOCABULARY, "max_position_embeddings": 64, "num_labels": labels, "initializer_range": 0.2}
        | ({"pad_token_id": 0, **ids} if family in (*causal, "modernbert") else {})
        | sizes
        | options,
    )
    return _made(auto, config, seed)


def two_sided_sizes(family: str, encoder: int, decoder: int, width: int = 32, heads: int = 4) -> dict:
    """Sizes and settings of an encoder and a decoder, as each family calls them."""
    if family in ("t5", "mt5"):
        depths = {"num_layers": encoder, "num_decoder_layers": decoder}
        return {**depths, "d_model": width, "d_kv": width // heads, "num_heads": heads, "d_ff": 64}
    sides = {"encoder": encoder, "decoder": decoder}
    sizes = {f"{side}_layers": depth for side, depth in sides.items()}
    sizes |= {f"{side}_attention_heads": heads for side in sides} | {f"{side}_ffn_dim": 64 for side in sides}
    return {**sizes, "d_model": width, "init_std": 0.2}


def tiny_pair(family: str, encoder: int = 3, decoder: int = 4, *, seed: int = 0, **options) -> PreTrainedModel:
    """A model with an encoder and a decoder, as `tiny_model` makes others."""
    ids = {"pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": 2}
    config = AutoConfig.for_model(
        family,
        **{"vocab_size": VOCABULARY, "max_position_embeddings": 64, **ids}
        | ({"decoder_vocab_size": VOCABULARY} if family == "marian" else {})
        | two_sided_sizes(family, encoder, decoder)
        | options,
    )
    model = _made(AutoModelForSeq2SeqLM, config, seed)
    if hasattr(model, "final_logits_bias"):  # Marian's checkpoints have one that is not 0
        model.final_logits_bias.copy_(torch.linspace(-1, 1, VOCABULARY))
    return model


def _made(auto: type, config, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto.from_config(config, **made_with(config))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def tiny_texts(sizes: Sequence[int] = (9, 5, 7), targets: Sequence[int] = (3, 6, 4), *, more: int = 0) -> dict:
    """Texts and what is to be written for them, one a size, padded to the longest and by `more`."""
    batch = tiny_batch(sizes=sizes, length=max(sizes) + more)
    written = tiny_batch(sizes=targets, length=max(targets) + more, seed=1)
    mask = written["attention_mask"]
    return {
        **{name: batch[name] for name in ("input_ids", "attention_mask")},
        "labels": written["input_ids"].masked_fill(mask == 0, -100),
        "decoder_attention_mask": mask,
    }


def tiny_batch(
    model: PreTrainedModel | int = VOCABULARY,
    sizes: Sequence[int] = (9, 5, 7),
    *,
    length: int | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """One example a size, padded with the model's own padding token to the longest, or to `length`."""
    vocabulary, pad, labels = (
        (model, 0, 3)
        if isinstance(model, int)
        else (model.config.vocab_size, model.config.pad_token_id, model.config.num_labels)
    )
    generator = torch.Generator().manual_seed(seed)
    longest = length or max(sizes)
    batch = {
        "input_ids": torch.full((len(sizes), longest), pad),
        "attention_mask": torch.zeros(len(sizes), longest, dtype=torch.long),
        "token_type_ids": torch.zeros(len(sizes), longest, dtype=torch.long),
    }
    for row, size in enumerate(sizes):
        batch["input_ids"][row, :size] = torch.randint(5, vocabulary, (size,), generator=generator)
        batch["attention_mask"][row, :size] = 1
        batch["token_type_ids"][row, size // 2 : size] = 1  # the second text of a pair
    if labels == 1:
        batch["labels"] = torch.randint(-20, 20, (len(sizes),), generator=generator) / 4
    else:
        batch["labels"] = torch.randint(0, labels, (len(sizes),), generator=generator)
    return batch


def columns_for(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The columns to call a model with by hand, independent of limbeck's choice of them."""
    taken = {
        "bert": ("input_ids", "attention_mask", "token_type_ids"),
        "electra": ("input_ids", "attention_mask", "token_type_ids"),
        "albert": ("input_ids", "attention_mask", "token_type_ids"),
    }.get(model.config.model_type.removeprefix("limbeck-"), ("input_ids", "attention_mask"))
    return {name: batch[name] for name in taken}
