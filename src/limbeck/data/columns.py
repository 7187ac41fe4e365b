"""Which columns of a table hold the text, its pair and the label."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from limbeck.data.spec import DataSpec
from limbeck.data.tasks import Columns
from limbeck.errors import LimbeckError, did_you_mean

_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("sentence_a", "sentence_b"),
    ("text", "text_pair"),
    ("question", "sentence"),
    ("question", "passage"),
    ("question", "context"),
    ("question", "answer"),
    ("query", "passage"),
    ("query", "document"),
)
_TEXTS = ("text", "sentence", "sentence1", "premise", "question", "query", "review", "content", "document", "comment")
_LABELS = (
    "label",
    "labels",
    "gold_label",
    "class",
    "target",
    "is_duplicate",
    "category",
    "sentiment",
    "score",
    "tags",
    "ner_tags",
    "answers",
)

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Table:
    """Columns as they were read, and where from. `classes` are the label names a hub dataset declares for a column."""

    origin: str
    columns: dict[str, list]
    classes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ragged: bool = False

    def changed(self, columns: dict[str, list]) -> "Table":
        """The same table with other values in some columns."""
        return replace(self, columns={**self.columns, **columns})


@dataclass(frozen=True)
class Rows:
    """The chosen columns of a table; `values` are the labels as they stand there, `classes` their declared names."""

    origin: str
    text: list[str]
    text_pair: list[str] | None
    values: list | None
    classes: tuple[str, ...] | None
    skipped: int


def is_number(value: object) -> bool:
    """Whether a label or field is a number, written as one or as text."""
    if isinstance(value, str):
        return _NUMBER.fullmatch(value.strip()) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)


def choose(table: Table, spec: DataSpec, usual: Iterable[Columns] = ()) -> tuple[Columns, bool]:
    """The table's columns and whether they were guessed.

    Columns the user named come first, then the first of `usual` whose texts are there, then a guess by name.
    """
    for option, name in (("--text", spec.text), ("--text-pair", spec.text_pair), ("--label", spec.label)):
        if name is not None and name not in table.columns:
            raise LimbeckError(
                f'{table.origin} has no column "{name}"; its columns are {_listed(table)}.'
                f"{did_you_mean(name, table.columns)} Give {option} one of these."
            )
    known = next((c for c in usual if c.text in table.columns and (c.text_pair or c.text) in table.columns), None)
    label = spec.label
    if label is None:
        label = known.label if known and known.label in table.columns else _named(table, _LABELS)
    if spec.text is not None:
        return Columns(spec.text, spec.text_pair, label), spec.label is None and label is not None
    if known is not None:
        return Columns(known.text, spec.text_pair or known.text_pair, label), False
    text, pair = _guess_texts(table, spec.text_pair, label)
    return Columns(text, pair, label), True


def extract(table: Table, columns: Columns) -> Rows:
    """The rows of the chosen columns. A row with a missing field is an error, or skipped in files known for such."""
    names = [name for name in columns if name is not None]
    missing = [
        place
        for place, values in enumerate(zip(*(table.columns[name] for name in names), strict=True))
        if any(_is_missing(value) for value in values)
    ]
    if missing and not table.ragged:
        raise LimbeckError(
            f"{table.origin}: row {missing[0] + 1} has nothing in one of {', '.join(names)}, as have "
            f"{len(missing) - 1} other rows. Fill the fields in or take the rows out."
        )
    skip = set(missing)

    def kept(name: str) -> list:
        return [value for place, value in enumerate(table.columns[name]) if place not in skip]

    return Rows(
        origin=table.origin,
        text=_texts(table, columns.text, kept(columns.text)),
        text_pair=_texts(table, columns.text_pair, kept(columns.text_pair)) if columns.text_pair else None,
        values=kept(columns.label) if columns.label else None,
        classes=table.classes.get(columns.label) if columns.label else None,
        skipped=len(missing),
    )


def _listed(table: Table) -> str:
    return ", ".join(f'"{name}"' for name in table.columns)


def _named(table: Table, candidates: Sequence[str]) -> str | None:
    lower = {name.lower(): name for name in table.columns}
    return next((lower[name] for name in candidates if name in lower), None)


def _guess_texts(table: Table, pair: str | None, label: str | None) -> tuple[str, str | None]:
    if pair is None:
        for first, second in _PAIRS:
            text, other = _named(table, [first]), _named(table, [second])
            if text and other and label not in (text, other):
                return text, other
    text = _named(table, [name for name in _TEXTS if name not in (pair, label)])
    if text is not None:
        return text, pair
    prose = [name for name, values in table.columns.items() if name not in (pair, label) and _is_prose(values)]
    if len(prose) == 1:
        return prose[0], pair
    raise LimbeckError(
        f"it is not clear which column of {table.origin} holds the text; its columns are {_listed(table)}. "
        "Name it with --text COLUMN, and for pairs the second text with --text-pair COLUMN."
    )


def _is_prose(values: list) -> bool:
    sample = values[:100]
    return all(isinstance(value, str) for value in sample) and not all(is_number(value) for value in sample)


def _is_missing(value: object) -> bool:
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def _texts(table: Table, name: str, values: list) -> list[str]:
    for place, value in enumerate(values):
        if not isinstance(value, str):
            raise LimbeckError(
                f'{table.origin}: the text column "{name}" holds a {type(value).__name__} ({str(value)[:40]}) in row '
                f"{place + 1}. Name a column of texts; the columns are {_listed(table)}."
            )
    return values
