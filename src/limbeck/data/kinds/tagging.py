"""A tag for every word."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from limbeck.data.columns import Columns, Table
from limbeck.data.corpus import Split
from limbeck.data.kinds.base import IGNORE, Kind
from limbeck.data.labels import class_ids, names_of
from limbeck.errors import LimbeckError

if TYPE_CHECKING:
    from torch import Tensor

Tags = list[list[str]]  # of every sentence
WORDS = ("tokens", "words")


class Tagged(NamedTuple):
    """The label of every token, IGNORE where it has none, and where sentences begin and end."""

    labels: np.ndarray
    offsets: np.ndarray


def f1(predictions: Tags, right: Tags) -> float:
    """F1 of the entities: one counts if both its words and its type are right."""
    found, there = _entities(predictions), _entities(right)
    return 2 * len(found & there) / max(len(found) + len(there), 1)


def precision(predictions: Tags, right: Tags) -> float:
    """The share of the entities found that are there."""
    found = _entities(predictions)
    return len(found & _entities(right)) / max(len(found), 1)


def recall(predictions: Tags, right: Tags) -> float:
    """The share of the entities there that are found."""
    there = _entities(right)
    return len(there & _entities(predictions)) / max(len(there), 1)


def accuracy(predictions: Tags, right: Tags) -> float:
    """The share of right tags."""
    return float(np.mean(np.concatenate(predictions) == np.concatenate(right)))


class Tagging(Kind):
    """A label for the first token of every word; the others have none, and are neither learnt nor compared.

    In a file, words and tags are lists, or texts with one space between two of them.
    """

    name = "tagging"
    auto = "AutoModelForTokenClassification"
    head = "classifier"
    pipeline = "token-classification"
    per_token = True
    classes = "tags"
    columns = tuple(Columns(name, None, None) for name in WORDS)
    metrics = {"f1": f1, "precision": precision, "recall": recall, "accuracy": accuracy}  # noqa: RUF012

    def recognised(self, table: Table) -> bool:
        return any(isinstance(table.columns[name][0], list) for name in WORDS if name in table.columns)

    def tidied(self, table: Table, columns: Columns) -> Table:
        words = [_listed(value) for value in table.columns[columns.text]]
        for row, sentence in enumerate(words):
            if any(not isinstance(word, str) or not word or " " in word for word in sentence):
                raise LimbeckError(
                    f'{table.origin}: row {row + 1} of "{columns.text}" is no list of words. A word is a text without '
                    "spaces; in CSV and TSV there is one space between two words."
                )
        changed: dict[str, list] = {columns.text: [" ".join(sentence) for sentence in words]}
        if columns.label is not None:
            tags = changed[columns.label] = [_listed(value) for value in table.columns[columns.label]]
            for row, (sentence, marks) in enumerate(zip(words, tags, strict=True)):
                if len(sentence) != len(marks):
                    raise LimbeckError(
                        f"{table.origin}: row {row + 1} has {len(sentence)} words and {len(marks)} tags. Give every "
                        "word its tag."
                    )
        return table.changed(changed)

    def names(self, values: Sequence) -> tuple[str, ...]:
        return names_of([tag for tags in values for tag in tags])

    def labels(self, values: Sequence, names: Sequence[str], *, origin: str, allowed_by: str) -> np.ndarray:
        rows = [row for row, tags in enumerate(values) for _ in tags]
        flat = [tag for tags in values for tag in tags]
        ids = class_ids(flat, names, origin=origin, allowed_by=allowed_by, rows=rows)
        return _ragged(np.split(ids, np.cumsum([len(tags) for tags in values])[:-1]))

    def moved(self, labels: np.ndarray, places: np.ndarray) -> np.ndarray:
        return _ragged([places[row] for row in labels])

    def usual_metrics(self, names: Sequence[str], values: Sequence) -> tuple[str, ...]:
        entities = any(name[:2] in ("B-", "I-") for name in names)
        return tuple(self.metrics) if entities else ("accuracy",)

    def tokens(self, tokenizer: Any, split: Split, *, stride: int, **options: Any) -> Mapping[str, list[list[int]]]:
        if not tokenizer.is_fast:
            raise LimbeckError(
                "tagging needs a tokenizer that says where its tokens stand in the text, and this one does not. Give a "
                "model with a fast tokenizer (tokenizer.json)."
            )
        # By places in the text: what a word is, tokenizers do not agree on.
        found = dict(tokenizer(split.text, truncation=True, return_offsets_mapping=True, **options))
        spans = found.pop("offset_mapping")
        if split.labels is not None:
            found["labels"] = [_placed(*row) for row in zip(split.text, spans, split.labels, strict=True)]
        return found

    def right(self, split: Split, tokens: Mapping[str, np.ndarray], offsets: np.ndarray) -> tuple[None, Tagged | None]:
        return None, Tagged(tokens["labels"], offsets) if "labels" in tokens else None

    def counted(self, mask: "Tensor", labels: "Tensor | None") -> "Tensor":
        return mask if labels is None else mask & (labels != IGNORE)

    def decided(self, logits: np.ndarray, names: Sequence[str], right: Tagged) -> Tags:
        return list(_sentences(logits.argmax(-1), names, right))

    def expected(self, right: Tagged, names: Sequence[str]) -> Tags:
        return list(_sentences(right.labels, names, right))

    def answers(self, logits: np.ndarray, names: Sequence[str], right: Tagged) -> list[dict[str, Any]]:
        return [{"prediction": tags} for tags in self.decided(logits, names, right)]

    def agreement(self, ours: Tags, theirs: Tags) -> float:
        return accuracy(ours, theirs)


def _listed(value: object) -> list:
    return value if isinstance(value, list) else str(value).split(" ")


def _ragged(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of different lengths as one array of arrays."""
    found = np.empty(len(rows), dtype=object)
    found[:] = list(rows)
    return found


def _placed(text: str, spans: Sequence[tuple[int, int]], tags: np.ndarray) -> list[int]:
    """The tag of each word at its first token. A token is of the word its last character is in: some begin with the
    space before."""
    starts = np.cumsum([0, *(len(word) + 1 for word in text.split(" ")[:-1])])
    labels, last = [], -1
    for start, end in spans:
        word = int(np.searchsorted(starts, end - 1, side="right")) - 1
        first = end > start and word > last and text[end - 1] != " "
        labels.append(int(tags[word]) if first else IGNORE)
        last = word if first else last
    if last < 0:
        raise LimbeckError(f'no word of "{text[:60]}" becomes a token: there is nothing to tag. Take the row out.')
    return labels


def _sentences(ids: np.ndarray, names: Sequence[str], right: Tagged) -> Iterator[list[str]]:
    for start, end in pairwise(right.offsets):
        labelled = right.labels[start:end] != IGNORE
        yield [str(names[place]) for place in ids[start:end][labelled]]


def _entities(sentences: Tags) -> set[tuple[int, int, int, str]]:
    """Sentence, first word, word behind the last, and type of every entity, in BIO or BIOES tags.

    An entity ends where another begins, or a tag has another type; one may begin with I.
    """
    found = set()
    for row, tags in enumerate(sentences):
        start, type_, ended = 0, "", True
        for place, tag in enumerate([*tags, "O"]):
            mark, _, name = tag.partition("-")
            goes_on = not ended and mark in ("I", "E") and name == type_
            if not ended and not goes_on:
                found.add((row, start, place, type_))
            if not goes_on:
                start, type_, ended = place, name, mark == "O"
            if mark in ("E", "S") and not ended:
                found.add((row, start, place + 1, type_))
                ended = True
    return found
