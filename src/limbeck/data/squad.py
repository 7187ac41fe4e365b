"""SQuAD: how its files are laid out, and how its official script scores answers."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from limbeck.errors import LimbeckError

Texts = tuple[str, ...]  # all that is right of a question; "" alone where its context has no answer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def columns(layout: Any, origin: str) -> dict[str, list]:
    """A row a question, as the hub has it, from articles of paragraphs of questions."""
    rows = []
    try:
        for article in layout["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    answers = [] if asked.get("is_impossible") else asked.get("answers")
                    rows.append((asked.get("id"), asked.get("question"), paragraph.get("context"), answers))
    except (KeyError, TypeError, AttributeError) as error:
        raise LimbeckError(
            f"{origin} is not laid out as SQuAD's files are, in data, paragraphs and qas: {error!r} after {len(rows)} "
            "questions. Rows of a table go into a .jsonl file, one object a line."
        ) from error
    return {name: [row[place] for row in rows] for place, name in enumerate(("id", "question", "context", "answers"))}


def f1(predictions: Sequence[str], right: Sequence[Texts]) -> float:
    """The mean F1 of an answer's words, with the right answer it is nearest to."""
    return _mean([max(_overlap(found, text) for text in texts) for found, texts in zip(predictions, right)])


def exact(predictions: Sequence[str], right: Sequence[Texts]) -> float:
    """The share of answers that are right, but for case, punctuation, articles and spaces."""
    return _mean([plain(found) in map(plain, texts) for found, texts in zip(predictions, right)])


def has_answer_f1(predictions: Sequence[str], right: Sequence[Texts]) -> float:
    """F1 of the questions whose context has an answer."""
    return f1(*_among(predictions, right, answered=True))


def has_answer_exact(predictions: Sequence[str], right: Sequence[Texts]) -> float:
    """Exact match of the questions whose context has an answer."""
    return exact(*_among(predictions, right, answered=True))


def no_answer(predictions: Sequence[str], right: Sequence[Texts]) -> float:
    """The share left unanswered of the questions whose context has no answer; their F1 and exact match."""
    return exact(*_among(predictions, right, answered=False))


@lru_cache(maxsize=2**16)
def plain(text: str) -> str:
    """An answer as it is compared: lower case, without punctuation and articles, one space between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _overlap(found: str, right: str) -> float:
    ours, theirs = plain(found).split(), plain(right).split()
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * (Counter(ours) & Counter(theirs)).total() / (len(ours) + len(theirs))


def _among(predictions: Sequence[str], right: Sequence[Texts], *, answered: bool) -> tuple[list[str], list[Texts]]:
    kept = [(found, texts) for found, texts in zip(predictions, right) if (texts != ("",)) == answered]
    return [found for found, _ in kept], [texts for _, texts in kept]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
