"""ROUGE-L and BLEU: how much of a text stands in another.

Both are as their papers have them (Lin, 2004; Papineni et al., 2002), with one reference. ROUGE-L compares whole texts,
not their sentences, by words in lower case without punctuation. BLEU compares runs of one to four words as they are
written, punctuation marks apart, and is not smoothed.
"""

import re
from collections import Counter
from collections.abc import Sequence
from math import exp, log

_WORDS = re.compile(r"\w+")
_MARKS = re.compile(r"\w+|[^\w\s]")
ORDERS = (1, 2, 3, 4)


def rouge_l_score(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words; 1 where both have none."""
    ours, theirs = (_WORDS.findall(part.lower()) for part in (text, reference))
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * _common(ours, theirs) / (len(ours) + len(theirs))


def bleu_score(texts: Sequence[str], references: Sequence[str]) -> float:
    """The geometric mean of the shares of the texts' n-grams that are right, less where they are shorter."""
    pairs = [(_MARKS.findall(text), _MARKS.findall(reference)) for text, reference in zip(texts, references)]
    hits, all_of = Counter(), Counter()
    for ours, theirs in pairs:
        for order in ORDERS:
            found, right = _grams(ours, order), _grams(theirs, order)
            hits[order] += (found & right).total()
            all_of[order] += found.total()
    if not all(hits[order] for order in ORDERS):
        return 0.0
    written, wanted = (sum(len(pair[side]) for pair in pairs) for side in (0, 1))
    precision = sum(log(hits[order] / all_of[order]) for order in ORDERS) / len(ORDERS)
    return exp(precision + min(0.0, 1 - wanted / written))


def _grams(words: Sequence[str], order: int) -> Counter:
    return Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    lengths = [0] * (len(other) + 1)
    for word in one:
        before = 0
        for place, match in enumerate(other, 1):
            above = lengths[place]
            lengths[place] = before + 1 if word == match else max(above, lengths[place - 1])
            before = above
    return lengths[-1]
