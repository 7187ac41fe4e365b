"""Sentences whose label lies in their structure: data for the demo, generated, so that it needs no download.

Wild and farm animals race, and the label is the side that wins: in "the rival of the hen was not beaten by the goat"
it is wild. A reader has to work out each animal's side through its chain of friends and rivals, and who wins through
verb, voice and negation. The two animals are always of different sides, so swapping them turns the label round and
leaves the bag of words as it was: word counts say nothing.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LABELS = ("farm", "wild")

_ANIMALS = {"farm": ("hen", "goat", "duck", "pony"), "wild": ("fox", "wolf", "bear", "hawk")}
_ALLIES = ("friend", "brother")
_FOES = ("rival", "enemy")
_ADJECTIVES = ("old", "young", "grey", "quick", "small", "brave")
# past, participle, infinitive
_WINNING = (("beat", "beaten", "beat"), ("outran", "outrun", "outrun"), ("passed", "passed", "pass"))
_LOSING = (("trailed", "trailed", "trail"), ("obeyed", "obeyed", "obey"))

# Simple sentences are common enough to be learnt first; without them the rest is a parity that training never enters.
_CHAIN_LENGTHS = (0, 1, 2, 3)
_CHAIN_WEIGHTS = (0.3, 0.35, 0.2, 0.15)
_RELATIONS = ("ally", "foe", "fixed")
_RELATION_WEIGHTS = (0.4, 0.35, 0.25)
_FIXED = {"wild": "hunter", "farm": "herder"}
_ADJECTIVE = 0.15
_LOSING_VERB = 0.15
_PASSIVE = 0.25
_NEGATED = 0.10
_SAME_SIDE = 0.25

Row = dict[str, str]


def generate(seed: int = 0, train: int = 6000, dev: int = 1000) -> tuple[list[Row], list[Row]]:
    """Train and dev rows (`text`, `label`): all different, half of each label."""
    rng = random.Random(seed)
    seen: set[str] = set()
    return _rows(rng, train, seen), _rows(rng, dev, seen)


def write(folder: str | Path, seed: int = 0, train: int = 6000, dev: int = 1000) -> None:
    """Write train.csv and dev.csv."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "dev"), generate(seed, train, dev), strict=True):
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ["text", "label"])
            writer.writeheader()
            writer.writerows(rows)


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer that knows the words of `texts`, with BERT's special tokens and token types."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = sorted({word for text in texts for word in text.split()})
    vocabulary = {word: index for index, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def _rows(rng: random.Random, count: int, seen: set[str]) -> list[Row]:
    wanted = dict.fromkeys(LABELS, count // 2)
    wanted[LABELS[0]] += count % 2
    rows: list[Row] = []
    while len(rows) < count:
        text, label = _sentence(rng)
        if wanted[label] and text not in seen:
            wanted[label] -= 1
            seen.add(text)
            rows.append({"text": text, "label": label})
    return rows


def _sentence(rng: random.Random) -> tuple[str, str]:
    side = rng.choice(LABELS)
    sides = [side, side if rng.random() < _SAME_SIDE else _other(side)]
    race, first_wins = _race(rng)
    words = [*_animal(rng, sides[0]), *race, *_animal(rng, sides[1]), "."]
    return " ".join(words), sides[0] if first_wins else sides[1]


def _animal(rng: random.Random, side: str) -> list[str]:
    """Somebody of that side: the goat; or the friend of the rival of the old fox."""
    words = []
    for _ in range(rng.choices(_CHAIN_LENGTHS, _CHAIN_WEIGHTS)[0]):
        relation = rng.choices(_RELATIONS, _RELATION_WEIGHTS)[0]
        if relation == "fixed":
            words += ["the", _FIXED[side], "of"]
            side = rng.choice(LABELS)
        else:
            words += ["the", rng.choice(_FOES if relation == "foe" else _ALLIES), "of"]
            side = _other(side) if relation == "foe" else side
    adjective = [rng.choice(_ADJECTIVES)] if rng.random() < _ADJECTIVE else []
    return [*words, "the", *adjective, rng.choice(_ANIMALS[side])]


def _race(rng: random.Random) -> tuple[list[str], bool]:
    """What happened, and whether the first-named animal wins."""
    losing, passive, negated = (rng.random() < chance for chance in (_LOSING_VERB, _PASSIVE, _NEGATED))
    past, participle, infinitive = rng.choice(_LOSING if losing else _WINNING)
    if passive:
        words = ["was", *(["not"] if negated else []), participle, "by"]
    else:
        words = ["did", "not", infinitive] if negated else [past]
    return words, (losing + passive + negated) % 2 == 0


def _other(side: str) -> str:
    return LABELS[1 - LABELS.index(side)]
