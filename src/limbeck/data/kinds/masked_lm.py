"""The hidden words of running text."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from limbeck.data.kinds.base import IGNORE
from limbeck.data.kinds.causal_lm import CausalLM, Told, Words, accuracy, perplexity

if TYPE_CHECKING:
    from torch import Tensor


class MaskedLM(CausalLM):
    """Hidden words are predicted from all others: see masking.py. Only they count, in losses and in scores."""

    name = "masked-lm"
    auto = "AutoModelForMaskedLM"
    head = ""
    pipeline = "fill-mask"
    output = 'logits = model(**tokenizer(f"A {tokenizer.mask_token} day.", return_tensors="pt")).logits'
    masked = True
    predicts = "hidden words"
    metrics = {"pseudo_perplexity": perplexity, "accuracy": accuracy}  # noqa: RUF012
    lower = ("pseudo_perplexity",)

    def owns(self, architecture: str, config: Any) -> bool:
        return architecture.endswith("ForMaskedLM")

    def targets(self, batch: Mapping[str, "Tensor"]) -> "Tensor | None":
        return batch.get("labels")

    def decided(self, logits: np.ndarray, names: Sequence[str], right: Words) -> Told:
        predicted = logits[right.ids != IGNORE]
        return Told(predicted[:, 0], predicted[:, 1].astype(np.int64))

    def expected(self, right: Words, names: Sequence[str]) -> np.ndarray:
        return right.ids[right.ids != IGNORE]

    def answers(self, logits: np.ndarray, names: Sequence[str], right: Words) -> list[dict[str, Any]]:
        hidden = right.ids != IGNORE
        blocks = [logits[start:end, 0][hidden[start:end]] for start, end in pairwise(right.offsets)]
        return [{"words": len(losses), "loss": float(losses.sum(dtype=np.float64))} for losses in blocks]
