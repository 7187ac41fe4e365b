"""The last word of a passage (LAMBADA)."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from limbeck.data.corpus import Split
from limbeck.data.kinds.base import IGNORE
from limbeck.data.kinds.causal_lm import CausalLM, Told, Words, exponential
from limbeck.errors import LimbeckError


def perplexity(predictions: Told, right: Words) -> float:
    """e to the mean cross-entropy of a whole last word."""
    return exponential(np.add.reduceat(predictions.losses.astype(np.float64), right.offsets[:-1]).mean())


def accuracy(predictions: Told, right: Words) -> float:
    """The share of last words all of whose tokens were thought the likeliest."""
    return float(np.logical_and.reduceat(predictions.words == right.ids, right.offsets[:-1]).mean())


class Lambada(CausalLM):
    """A passage a row, of which the last word is to be predicted from all before it; long ones lose their beginning."""

    name = "lambada"
    like = "causal-lm"
    packed = False
    predicts = "the last word"
    metrics = {"accuracy": accuracy, "perplexity": perplexity}  # noqa: RUF012

    def owns(self, architecture: str, config: Any) -> bool:
        return False

    def tokens(self, tokenizer: Any, split: Split, *, stride: int, **options: Any) -> Mapping[str, list[list[int]]]:
        if not tokenizer.is_fast:
            raise LimbeckError(
                "where the last word begins, only a fast tokenizer (tokenizer.json) says, and this model has another."
            )
        side, tokenizer.truncation_side = tokenizer.truncation_side, "left"
        try:
            texts = [text.rstrip() for text in split.text]
            found = dict(tokenizer(texts, truncation=True, return_offsets_mapping=True, **options))
        finally:
            tokenizer.truncation_side = side
        spans = found.pop("offset_mapping")
        found["labels"] = [_last_word(*row) for row in zip(texts, found["input_ids"], spans, strict=True)]
        return found

    def decided(self, logits: np.ndarray, names: Sequence[str], right: Words) -> Told:
        told = logits[np.flatnonzero(right.ids != IGNORE) - 1]  # a word is told of at the token before
        return Told(told[:, 0], told[:, 1].astype(np.int64))

    def expected(self, right: Words, names: Sequence[str]) -> Words:
        """The tokens of the last words, end to end."""
        ending = right.ids != IGNORE
        lengths = np.add.reduceat(ending, right.offsets[:-1])
        return Words(right.ids[ending], np.concatenate([[0], np.cumsum(lengths)]))

    def answers(self, logits: np.ndarray, names: Sequence[str], right: Words) -> list[dict[str, Any]]:
        told, words = self.decided(logits, names, right), self.expected(right, names)
        return [
            {
                "right": bool((told.words[start:end] == words.ids[start:end]).all()),
                "loss": float(told.losses[start:end].sum()),
            }
            for start, end in pairwise(words.offsets)
        ]


def _last_word(text: str, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    """The tokens of the last word, in their places; IGNORE in all others."""
    begins = len(text) - len(text.split()[-1])
    found = [token if end > begins else IGNORE for token, (_, end) in zip(ids, spans, strict=True)]
    if found[0] != IGNORE:
        raise LimbeckError(f'"{text[:60]}" is one word, with nothing before it to predict it from. Take the row out.')
    return found
