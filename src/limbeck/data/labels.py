"""How label values become class ids, and how a corpus takes on a model's label order."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from limbeck.data.columns import is_number
from limbeck.data.corpus import Corpus, Split
from limbeck.data.tasks import plain
from limbeck.errors import LimbeckError, did_you_mean


def kind_of(values: Sequence) -> Literal["classification", "regression"]:
    """Regression if the values are numbers and not all whole; anything else names classes."""
    numbers = all(is_number(value) for value in values)
    whole = numbers and all(float(value).is_integer() for value in values)
    return "regression" if numbers and not whole else "classification"


def names_of(values: Sequence) -> tuple[str, ...]:
    """The distinct label names: numbers in numerical order, words in alphabetical order."""
    names = {_spelled(value) for value in values}
    return tuple(sorted(names, key=float if all(is_number(name) for name in names) else str))


def class_ids(values: Sequence, names: Sequence[str], *, origin: str, allowed_by: str) -> np.ndarray:
    """Each value's place in `names`; whole numbers count as places where the names are words."""
    spelled = [_spelled(value) for value in values]
    place = {key: index for index, key in enumerate(_keys(names))}
    words = not any(is_number(name) for name in names)
    if words and all(is_number(value) for value in spelled):
        place = {str(index): index for index in range(len(names))}
        found = spelled
    else:
        found = _keys_as(spelled, names)
    for row, key in enumerate(found):
        if key not in place:
            raise LimbeckError(
                f'{origin}: row {row + 1} has the label "{values[row]}", which is not among the labels of {allowed_by} '
                f"({', '.join(names)}).{did_you_mean(str(values[row]), names)} Mend the file, or name all labels in "
                "order with --labels."
            )
    return np.array([place[key] for key in found], dtype=np.int64)


def scores(values: Sequence, *, origin: str) -> np.ndarray:
    """Regression targets."""
    for row, value in enumerate(values):
        if not is_number(value) or not np.isfinite(float(value)):
            raise LimbeckError(
                f'{origin}: row {row + 1} has the label "{value}" where a score is to be predicted. '
                "Mend the row; if the labels name classes, list them with --labels."
            )
    return np.array([float(value) for value in values], dtype=np.float32)


def is_generic(id2label: Mapping[int, str]) -> bool:
    """Whether a model's label names say nothing (LABEL_0, LABEL_1, …)."""
    return all(re.fullmatch(r"LABEL_\d+", name) for name in id2label.values())


def align(corpus: Corpus, id2label: Mapping[int, str], owner: str) -> tuple[Corpus, str]:
    """The corpus with class ids in the model's order, and a line that says what was done.

    Names are compared without case, hyphens, underscores and spaces, and never guessed: other names are an error. A
    model whose names are only LABEL_0… is taken to have the data's order. `Task.labels` keep the data's spelling. A
    corpus without labels takes the model's names.
    """
    data, task = corpus.task.labels, corpus.task
    if task.kind == "regression":
        return corpus, f"{task.name} predicts a score: there are no label names to align with {owner}."
    model = tuple(name for _, name in sorted((int(index), name) for index, name in id2label.items()))
    if not data:
        return replace(corpus, task=replace(task, labels=model)), f"Labels taken from {owner}: {_shown(model)}."
    if len(data) != len(model):
        raise _mismatch(corpus, model, owner)
    if is_generic(id2label):
        return corpus, f"{owner} names its labels only LABEL_0…: mapped by index, {_shown(data)}."
    wanted = {key: index for index, key in enumerate(_keys(model))}
    if set(wanted) != set(_keys_as(data, model)):
        raise _mismatch(corpus, model, owner)
    moved = np.array([wanted[key] for key in _keys_as(data, model)], dtype=np.int64)
    labels = tuple(data[place] for place in np.argsort(moved))
    if labels == data:
        return corpus, f"The labels are in the order of {owner}: {_shown(labels)}."
    aligned = replace(
        corpus,
        task=replace(task, labels=labels),
        train=_moved(corpus.train, moved) if corpus.train is not None else None,
        evals={name: _moved(split, moved) for name, split in corpus.evals.items()},
    )
    return aligned, f"The labels were put in the order of {owner}: {_shown(labels)}."


def _moved(split: Split, moved: np.ndarray) -> Split:
    return split if split.labels is None else replace(split, labels=moved[split.labels])


def _mismatch(corpus: Corpus, model: Sequence[str], owner: str) -> LimbeckError:
    data = corpus.task.labels
    if len(data) <= len(model):  # the data may lack a class
        advice = (
            "If the data's labels mean these classes, in the data's own order, say so with --labels "
            f"{','.join(model)}; otherwise rename them in the file or give another model."
        )
    else:
        advice = f"There are {len(data)} against {len(model)}: is this the right label column, and are its rows clean?"
    return LimbeckError(
        f"The labels of the data and of {owner} differ: {corpus.task.name} has {_shown(data)}; {owner} has "
        f"{_shown(model)}. {advice}"
    )


def _shown(names: Sequence[str], most: int = 8) -> str:
    more = f", … ({len(names)} in all)" if len(names) > most else ""
    return ", ".join(f"{index} = {name}" for index, name in enumerate(names[:most])) + more


def _spelled(value: object) -> str:
    """A label as a name: 1, 1.0 and "1" are one; JSON's booleans keep JSON's spelling."""
    if isinstance(value, bool):
        return str(value).lower()
    if is_number(value) and float(value).is_integer():  # pyright: ignore[reportArgumentType]
        return str(int(float(value)))  # pyright: ignore[reportArgumentType]
    return str(value).strip()


def _keys(names: Sequence[str]) -> list[str]:
    return _keys_as(names, names)


def _keys_as(names: Sequence[str], owners: Sequence[str]) -> list[str]:
    """Names as they are compared with the owners': loosely, unless that would make two of the owners' names one."""
    loose = len({plain(name) for name in owners}) == len(owners)
    return [plain(name) if loose else name for name in names]
