"""A text for a text: summaries, translations, answers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from limbeck.data.columns import Columns, Table
from limbeck.data.corpus import Split
from limbeck.data.kinds.base import IGNORE, Kind
from limbeck.data.kinds.causal_lm import exponential
from limbeck.data.rouge_bleu import bleu_score, rouge_l_score
from limbeck.errors import LimbeckError

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = (
    ("source", "target"),
    ("text", "summary"),
    ("document", "summary"),
    ("article", "highlights"),
    ("dialogue", "summary"),
    ("input", "output"),
)


class Texts(NamedTuple):
    """The texts to be written, and their tokens end to end."""

    texts: list[str]
    tokens: np.ndarray


class Written(NamedTuple):
    """What a model writes for every example; and of every token of the right texts, given those before it, its
    cross-entropy and the token thought the likeliest."""

    texts: list[str]
    told: np.ndarray


def rouge_l(predictions: Written, right: Texts) -> float:
    """F1 of the longest common subsequence of words, a mean over the examples."""
    pairs = zip(predictions.texts, right.texts, strict=True)
    return float(np.mean([rouge_l_score(text, reference) for text, reference in pairs]))


def bleu(predictions: Written, right: Texts) -> float:
    """BLEU of all texts together, one reference each."""
    return bleu_score(predictions.texts, right.texts)


def exact_match(predictions: Written, right: Texts) -> float:
    """The share of texts that are the right one, but for spaces at their ends."""
    pairs = zip(predictions.texts, right.texts, strict=True)
    return float(np.mean([text.strip() == reference.strip() for text, reference in pairs]))


def accuracy(predictions: Written, right: Texts) -> float:
    """The share of tokens of the right texts that were thought the likeliest, given those before them."""
    return float(np.mean(predictions.told[:, 1] == right.tokens))


def perplexity(predictions: Written, right: Texts) -> float:
    """e to the mean cross-entropy of a token of the right texts."""
    return exponential(predictions.told[:, 0].mean(dtype=np.float64))


class Seq2Seq(Kind):
    """A text to be written, token by token, by a decoder that attends to an encoder."""

    name = "seq2seq"
    auto = "AutoModelForSeq2SeqLM"
    head = "lm_head"
    pipeline = "text2text-generation"
    output = (
        'text = tokenizer("A sentence.", return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**text)[0], skip_special_tokens=True))"
    )
    per_token = True
    vocabulary = True
    writes = True
    named = False
    predicts = "a text"
    columns = tuple(Columns(text, None, target) for text, target in COLUMNS)
    metrics = {  # noqa: RUF012
        "rouge_l": rouge_l,
        "bleu": bleu,
        "exact_match": exact_match,
        "accuracy": accuracy,
        "perplexity": perplexity,
    }
    lower = ("perplexity",)

    def owns(self, architecture: str, config: Any) -> bool:
        own = architecture.endswith(("ForConditionalGeneration", "MTModel", "WithLMHeadModel"))
        return own and config.is_encoder_decoder

    def recognised(self, table: Table) -> bool:
        pairs = [(table.columns[a], table.columns[b]) for a, b in COLUMNS if a in table.columns and b in table.columns]
        return any(isinstance(value, str) and " " in value.strip() for _, target in pairs for value in target)

    def labels(self, values: Sequence, names: Sequence[str], *, origin: str, allowed_by: str) -> np.ndarray:
        for row, value in enumerate(values):
            if not isinstance(value, str):
                raise LimbeckError(
                    f"{origin}: row {row + 1} has {value!r} where a text is to be. Name the column of texts to be "
                    "written with --label."
                )
        return np.array(values, dtype=object)

    def settings(self, names: Sequence[str]) -> dict[str, Any]:
        return {}

    def tokens(self, tokenizer: Any, split: Split, *, stride: int, **options: Any) -> Mapping[str, list[list[int]]]:
        if split.labels is None:
            raise LimbeckError("a decoder reads the text to be written, and there is none. Give files with both texts.")
        found = dict(super().tokens(tokenizer, split, stride=stride, **options))
        written = tokenizer(text_target=split.labels.tolist(), truncation=True, **options)
        return {**found, "labels": written["input_ids"]}

    def right(self, split: Split, tokens: Mapping[str, np.ndarray], offsets: np.ndarray) -> tuple[None, Texts | None]:
        return None, None if split.labels is None else Texts(split.labels.tolist(), tokens["labels"])

    def counted(self, mask: "Tensor", labels: "Tensor | None") -> "Tensor":
        return mask if labels is None else mask & (labels != IGNORE)

    def decided(self, logits: Any, names: Sequence[str], right: Texts) -> Written:
        return logits

    def answers(self, logits: Any, names: Sequence[str], right: Texts) -> list[dict[str, Any]]:
        return [{"prediction": text} for text in logits.texts]

    def agreement(self, ours: Written, theirs: Written) -> float:
        return exact_match(ours, Texts(theirs.texts, theirs.told))
