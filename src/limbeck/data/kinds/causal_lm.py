"""The next word of running text."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from limbeck.data.kinds.base import IGNORE, Kind

if TYPE_CHECKING:
    from torch import Tensor


class Words(NamedTuple):
    """The words of a text, and where its blocks begin and end."""

    ids: np.ndarray
    offsets: np.ndarray


class Told(NamedTuple):
    """Of every word that is predicted, its cross-entropy and the word thought the likeliest."""

    losses: np.ndarray
    words: np.ndarray


def perplexity(predictions: Told, right: np.ndarray) -> float:
    """e to the mean cross-entropy of a word."""
    return exponential(predictions.losses.mean(dtype=np.float64))


def accuracy(predictions: Told, right: np.ndarray) -> float:
    """The share of words that were thought the likeliest."""
    return float(np.mean(predictions.words == right))


class CausalLM(Kind):
    """Every token is predicted from those before it in its block; the first of a block is not."""

    name = "causal-lm"
    auto = "AutoModelForCausalLM"
    head = "lm_head"
    pipeline = "text-generation"
    output = 'text = tokenizer("Once", return_tensors="pt")\nprint(tokenizer.decode(model.generate(**text)[0]))'
    per_token = True
    packed = True
    vocabulary = True
    labelled = False
    named = False
    predicts = "the next word"
    metrics = {"perplexity": perplexity, "accuracy": accuracy}  # noqa: RUF012
    lower = ("perplexity",)

    def owns(self, architecture: str, config: Any) -> bool:
        return architecture.endswith(("ForCausalLM", "LMHeadModel"))

    def settings(self, names: Sequence[str]) -> dict[str, Any]:
        return {}

    def right(self, split: Any, tokens: Mapping[str, np.ndarray], offsets: np.ndarray) -> tuple[None, Words]:
        return None, Words(tokens.get("labels", tokens["input_ids"]), offsets)

    def targets(self, batch: Mapping[str, "Tensor"]) -> "Tensor":
        """At every token, the next one. Labels, if there are any, stand at the tokens they name, as in transformers."""
        import torch.nn.functional as F

        named = batch.get("labels", batch["input_ids"])
        named = named.masked_fill(batch["attention_mask"] == 0, IGNORE)
        return F.pad(named[:, 1:], (0, 1), value=IGNORE)

    def counted(self, mask: "Tensor", labels: "Tensor | None") -> "Tensor":
        return mask if labels is None else mask & (labels != IGNORE)

    def decided(self, logits: np.ndarray, names: Sequence[str], right: Words) -> Told:
        predicted = logits[predicting(right)]
        return Told(predicted[:, 0], predicted[:, 1].astype(np.int64))

    def expected(self, right: Words, names: Sequence[str]) -> np.ndarray:
        return right.ids[np.flatnonzero(predicting(right)) + 1]

    def answers(self, logits: np.ndarray, names: Sequence[str], right: Words) -> list[dict[str, Any]]:
        blocks = [logits[start : end - 1, 0] for start, end in pairwise(right.offsets)]
        return [{"words": len(losses), "loss": float(losses.sum(dtype=np.float64))} for losses in blocks]

    def agreement(self, ours: Told, theirs: Told) -> float:
        return float(np.mean(ours.words == theirs.words))


def predicting(right: Words) -> np.ndarray:
    """Which tokens a word is predicted at: all but the last of a block."""
    found = np.ones(len(right.ids), dtype=bool)
    found[right.offsets[1:] - 1] = False
    return found


def exponential(loss: float) -> float:
    """e to a loss; the largest there is where a model diverged, since NaN would win every selection."""
    return float(np.exp(min(loss, 700.0) if np.isfinite(loss) else 700.0))
