"""How label values become class ids and scores."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from limbeck.data.columns import is_number
from limbeck.data.tasks import plain
from limbeck.errors import LimbeckError, did_you_mean


def kind_of(values: Sequence) -> Literal["classification", "regression", "multi-label"]:
    """Multi-label if the values are lists, regression if they are numbers and not all whole; others name classes."""
    if any(isinstance(value, list) for value in values):
        return "multi-label"
    numbers = all(is_number(value) for value in values)
    whole = numbers and all(float(value).is_integer() for value in values)
    return "regression" if numbers and not whole else "classification"


def names_of(values: Sequence) -> tuple[str, ...]:
    """The distinct label names: numbers in numerical order, words in alphabetical order."""
    names = {_spelled(value) for value in values}
    return tuple(sorted(names, key=float if all(is_number(name) for name in names) else str))


def class_ids(
    values: Sequence, names: Sequence[str], *, origin: str, allowed_by: str, rows: Sequence[int] | None = None
) -> np.ndarray:
    """Each value's place in `names`; whole numbers count as places where the names are words.

    `rows` says in which row of the file a value stands, where a row may have several.
    """
    spelled = [_spelled(value) for value in values]
    place = {key: index for index, key in enumerate(keys(names, names))}
    words = not any(is_number(name) for name in names)
    if words and all(is_number(value) for value in spelled):
        place = {str(index): index for index in range(len(names))}
        found = spelled
    else:
        found = keys(spelled, names)
    for at, key in enumerate(found):
        if key not in place:
            row = at if rows is None else rows[at]
            raise LimbeckError(
                f'{origin}: row {row + 1} has the label "{values[at]}", which is not among the labels of {allowed_by} '
                f"({', '.join(names)}).{did_you_mean(str(values[at]), names)} Mend the file, or name all labels in "
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


def _spelled(value: object) -> str:
    """A label as a name: 1, 1.0 and "1" are one; JSON's booleans keep JSON's spelling."""
    if isinstance(value, bool):
        return str(value).lower()
    if is_number(value) and float(value).is_integer():  # pyright: ignore[reportArgumentType]
        return str(int(float(value)))  # pyright: ignore[reportArgumentType]
    return str(value).strip()


def keys(names: Sequence[str], owners: Sequence[str]) -> list[str]:
    """Names as they are compared with the owners': loosely, unless that would make two of the owners' names one."""
    loose = len({plain(name) for name in owners}) == len(owners)
    return [plain(name) if loose else name for name in names]
