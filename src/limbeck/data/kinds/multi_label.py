"""Any number of labels an example."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.metrics import f1_score

from limbeck.data.columns import Columns, Table
from limbeck.data.kinds.base import Kind
from limbeck.data.labels import class_ids, names_of

if TYPE_CHECKING:
    from torch import Tensor


def micro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """F1 of all decisions together."""
    return float(f1_score(labels, predictions, average="micro", zero_division=0))  # pyright: ignore[reportArgumentType]


def macro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The mean over the labels of their F1."""
    return float(f1_score(labels, predictions, average="macro", zero_division=0))  # pyright: ignore[reportArgumentType]


class MultiLabel(Kind):
    """A yes or no for each label: as many rows an example, each a distribution over no and yes.

    In a file an example's labels are a list, or a text with commas between them.
    """

    name = "multi-label"
    classes = "labels, any number of them an example"
    metrics = {"micro_f1": micro_f1, "macro_f1": macro_f1}  # noqa: RUF012

    def owns(self, architecture: str, config: Any) -> bool:
        return super().owns(architecture, config) and config.problem_type == "multi_label_classification"

    def tidied(self, table: Table, columns: Columns) -> Table:
        if columns.label is None:
            return table
        return table.changed({columns.label: [_listed(value) for value in table.columns[columns.label]]})

    def names(self, values: Sequence) -> tuple[str, ...]:
        return names_of([label for labels in values for label in labels])

    def labels(self, values: Sequence, names: Sequence[str], *, origin: str, allowed_by: str) -> np.ndarray:
        found = np.zeros((len(values), len(names)), dtype=np.int64)
        rows = [row for row, labels in enumerate(values) for _ in labels]
        flat = [label for labels in values for label in labels]
        found[rows, class_ids(flat, names, origin=origin, allowed_by=allowed_by, rows=rows)] = 1
        return found

    def moved(self, labels: np.ndarray, places: np.ndarray) -> np.ndarray:
        return labels[:, np.argsort(places)]

    def settings(self, names: Sequence[str]) -> dict[str, Any]:
        return {**super().settings(names), "problem_type": "multi_label_classification"}

    def distributions(self, logits: "Tensor", mask: "Tensor") -> tuple["Tensor", "Tensor"]:
        import torch

        return torch.stack([torch.zeros_like(logits), logits], -1), mask[:, None].expand_as(logits)

    def decided(self, logits: np.ndarray, names: Sequence[str], right: Any) -> np.ndarray:
        return (logits > 0).astype(np.int64)

    def answers(self, logits: np.ndarray, names: Sequence[str], right: Any) -> list[dict[str, Any]]:
        return [
            {"prediction": [name for name, z in zip(names, row, strict=True) if z > 0], "logits": row.tolist()}
            for row in logits
        ]


def _listed(value: object) -> list:
    if isinstance(value, str):
        return [label.strip() for label in value.split(",") if label.strip()]
    return value if isinstance(value, list) else [] if value is None else [value]
