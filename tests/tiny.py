"""Models of every family small enough to run in a millisecond, and batches for them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from limbeck.architectures import FAMILIES, attending

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

every_family = tuple(FAMILIES)
causal = tuple(name for name, family in FAMILIES.items() if family.reads == "last")
pre_norm = tuple(name for name, family in FAMILIES.items() if family.norm)


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
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto.from_config(config, **attending(config))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


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
