"""One of several classes an example."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from limbeck.data.kinds.base import Kind
from limbeck.data.labels import class_ids, names_of


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The share of right predictions."""
    return accuracy_score(labels, predictions)


def f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """F1 of class 1 against the rest."""
    return f1_score(labels == 1, predictions == 1, zero_division=0)  # pyright: ignore[reportArgumentType]


def matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Matthews' correlation of the predicted with the right classes."""
    return matthews_corrcoef(labels, predictions)


class Classification(Kind):
    """One label an example."""

    name = "classification"
    output = (
        'inputs = tokenizer("A sentence.", truncation=True, return_tensors="pt")\n'
        "print(model.config.id2label[model(**inputs).logits.argmax().item()])"
    )
    metrics = {"accuracy": accuracy, "f1": f1, "matthews": matthews}  # noqa: RUF012

    def owns(self, architecture: str, config: Any) -> bool:
        several = config.num_labels != 1 and config.problem_type != "multi_label_classification"
        return super().owns(architecture, config) and several

    def names(self, values: Sequence) -> tuple[str, ...]:
        return names_of(values)

    def labels(self, values: Sequence, names: Sequence[str], *, origin: str, allowed_by: str) -> np.ndarray:
        return class_ids(values, names, origin=origin, allowed_by=allowed_by)

    def usual_metrics(self, names: Sequence[str], values: Sequence) -> tuple[str, ...]:
        return ("accuracy", "f1", "matthews") if len(names) == 2 else ("accuracy",)
