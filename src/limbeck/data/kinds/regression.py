"""A score an example."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr

from limbeck.data.kinds.base import Kind
from limbeck.data.labels import scores


def pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The linear correlation of two scores."""
    return _correlation(pearsonr, predictions, labels)


def spearman(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The correlation of the ranks of two scores."""
    return _correlation(spearmanr, predictions, labels)


class Regression(Kind):
    """One number an example."""

    name = "regression"
    named = False
    regression = True
    predicts = "a score"
    metrics = {"spearman": spearman, "pearson": pearson}  # noqa: RUF012

    def owns(self, architecture: str, config: Any) -> bool:
        return super().owns(architecture, config) and config.num_labels == 1

    def labels(self, values: Sequence, names: Sequence[str], *, origin: str, allowed_by: str) -> np.ndarray:
        return scores(values, origin=origin)

    def settings(self, names: Sequence[str]) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def decided(self, logits: np.ndarray, names: Sequence[str], right: Any) -> np.ndarray:
        return logits.reshape(len(logits)).astype(np.float64)

    def answers(self, logits: np.ndarray, names: Sequence[str], right: Any) -> list[dict[str, Any]]:
        return [{"prediction": float(row[0]), "logits": row.tolist()} for row in logits]

    def agreement(self, ours: np.ndarray, theirs: np.ndarray) -> float:
        return pearson(ours, theirs)


def _correlation(statistic: Callable[..., Any], predictions: np.ndarray, labels: np.ndarray) -> float:
    """A collapsed or diverged model has no correlation: it scores 0, since NaN would poison means and selection."""
    has_one = all(np.isfinite(values).all() and np.ptp(values) > 0 for values in (predictions, labels))
    return float(statistic(predictions, labels).statistic) if has_one else 0.0
