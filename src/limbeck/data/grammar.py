"""Sentences whose label lies in their structure: data for the demo, generated, so that it needs no download.

Wild and farm animals race, and the label is the side that wins: in "the rival of the hen was not beaten by the goat" it
is wild. A reader has to work out each animal's side along its chain of friends, rivals, hunters and herders, and who
wins from verb, voice and negation. Most races are between the sides; there, swapping the two animals turns the label
round and leaves the bag of words as it was, so word counts say next to nothing.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LABELS: tuple[str, str] = ("farm", "wild")

_ANIMALS: dict[str, tuple[str, ...]] = {
    "farm": ("hen", "goat", "duck", "pony"),
    "wild": ("fox", "wolf", "bear", "hawk"),
}
_ALLIES = ("friend", "brother")
_FOES = ("rival", "enemy")
# Of this side whoever follows: so a chain is to be read in order, and counting its rivals is not enough.
_KEEPER: dict[str, str] = {"farm": "herder", "wild": "hunter"}
_ADJECTIVES = ("old", "young", "grey", "quick", "small", "brave")
# past, participle, infinitive
_WINNING = (("beat", "beaten", "beat"), ("outran", "outrun", "outrun"), ("passed", "passed", "pass"))
_LOSING = (("trailed", "trailed", "trail"), ("obeyed", "obeyed", "obey"))

_CHAIN_LENGTHS = {0: 0.30, 1: 0.35, 2: 0.20, 3: 0.15}
_RELATIONS = {"ally": 0.40, "foe": 0.35, "keeper": 0.25}
_ADJECTIVE = 0.15
_LOSING_VERB = 0.15
_PASSIVE = 0.25
_NEGATED = 0.10
# Races inside one side have a label that words give away. With none of them, three BERTs of four layers trained from
# nothing stayed at chance for 3, 6 and over 10 epochs; with some, they learn from the first epoch on.
_SAME_SIDE = 0.25

Row = dict[str, str]
T = TypeVar("T")


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
    for _ in range(_drawn(rng, _CHAIN_LENGTHS)):
        relation = _drawn(rng, _RELATIONS)
        if relation == "ally":
            words += ["the", rng.choice(_ALLIES), "of"]
        elif relation == "foe":
            words += ["the", rng.choice(_FOES), "of"]
            side = _other(side)
        else:
            words += ["the", _KEEPER[side], "of"]
            side = rng.choice(LABELS)
    adjective = [rng.choice(_ADJECTIVES)] if rng.random() < _ADJECTIVE else []
    return [*words, "the", *adjective, rng.choice(_ANIMALS[side])]


def _drawn(rng: random.Random, weights: dict[T, float]) -> T:
    return rng.choices(list(weights), list(weights.values()))[0]


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
