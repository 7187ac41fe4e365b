"""How good a model is: its predictions, its metrics on the 0–100 scale, and how much of the teacher it keeps."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch import Tensor, nn
from transformers import PreTrainedModel

from limbeck.architectures import inputs
from limbeck.data.encoding import Encoded
from limbeck.data.plan import bucket
from limbeck.data.tasks import Task
from limbeck.errors import LimbeckError, did_you_mean

__all__ = ["METRICS", "agreement", "arguments", "evaluate", "evaluating", "measure", "predict", "retention"]


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The share of right predictions."""
    return accuracy_score(labels, predictions)


def f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """F1 of class 1 against the rest."""
    return f1_score(labels == 1, predictions == 1, zero_division=0)  # pyright: ignore[reportArgumentType]


def matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Matthews' correlation of the predicted with the right classes."""
    return matthews_corrcoef(labels, predictions)


def pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The linear correlation of two scores."""
    return _correlation(pearsonr, predictions, labels)


def spearman(predictions: np.ndarray, labels: np.ndarray) -> float:
    """The correlation of the ranks of two scores."""
    return _correlation(spearmanr, predictions, labels)


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def measure(task: Task, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Every metric of `task`, on the 0–100 scale. A correlation with constant or non-finite predictions is 0."""
    if len(labels) == 0:
        raise LimbeckError(f"Task {task.name} has no example to score. Give an evaluation split with at least one row.")
    unknown = [name for name in task.metrics if name not in METRICS]
    if unknown:
        raise LimbeckError(
            f"Task {task.name} asks for the metric {unknown[0]!r}; there are {', '.join(METRICS)}."
            + did_you_mean(unknown[0], METRICS)
        )
    predictions = _decide(task, logits)
    return {name: 100 * float(METRICS[name](predictions, labels)) for name in task.metrics}


def predict(
    model: PreTrainedModel,
    encoded: Encoded,
    *,
    device: torch.device | str | None = None,
    batch_size: int = 64,
    precision: torch.dtype | None = None,
) -> np.ndarray:
    """The logits of every example, in the order of `encoded`, as float32.

    Runs without dropout and leaves every module in the mode it was found in. `device` moves the model there first;
    by default it runs where it is. `precision` turns on autocast to that type; by default the model's own is used.
    """
    if len(encoded) == 0:
        raise LimbeckError("There is no example to predict. Give data with at least one row.")
    if device is not None:
        model.to(device)  # pyright: ignore[reportArgumentType] -- transformers hides the signature
    lengths = encoded.lengths
    by_length = np.argsort(lengths, kind="stable")
    autocast = torch.autocast(model.device.type, dtype=precision, enabled=precision is not None)
    rows = []
    # Not in inference mode: weights that a sharded model gathers there could not be trained afterwards.
    with evaluating(model), torch.no_grad(), autocast:
        for start in range(0, len(by_length), batch_size):
            ids = by_length[start : start + batch_size]
            batch = encoded.batch(ids, bucket(int(lengths[ids].max()), int(lengths.max())))
            rows.append(model(**arguments(model, batch)).logits.float())
    logits = torch.cat(rows).cpu().numpy()
    ordered = np.empty_like(logits)
    ordered[by_length] = logits
    return ordered


def evaluate(model: PreTrainedModel, encoded: Encoded, task: Task, **options: Any) -> dict[str, float]:
    """The scores of `model` on labelled examples; `options` are those of `predict`."""
    if encoded.labels is None:
        raise LimbeckError(f"Task {task.name}: these examples have no labels, so they cannot be scored.")
    return measure(task, predict(model, encoded, **options), encoded.labels)


def retention(student: float, teacher: float | None) -> float | None:
    """The student's score in percent of the teacher's; None without a teacher, or where it scores 0 or below."""
    return None if teacher is None or teacher <= 0 else 100 * student / teacher


def agreement(student_logits: np.ndarray, teacher_logits: np.ndarray, task: Task) -> float:
    """Fidelity to the teacher: equal decisions in percent, or Pearson × 100 on a regression task."""
    same = pearson if task.kind == "regression" else accuracy
    return 100 * float(same(_decide(task, student_logits), _decide(task, teacher_logits)))


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Dropout off inside; then every module as it was, since a frozen part may be in eval mode on purpose."""
    training = [module for model in models for module in model.modules() if module.training]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def arguments(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The columns of `batch` that the model takes, where the model is."""
    return {name: batch[name].to(model.device, non_blocking=True) for name in inputs(model) if name in batch}


def _decide(task: Task, logits: np.ndarray) -> np.ndarray:
    """What the model answers: a number on a regression task, else the index of the likeliest class."""
    return logits.reshape(len(logits)).astype(np.float64) if task.kind == "regression" else logits.argmax(axis=-1)


def _correlation(statistic: Callable[..., Any], predictions: np.ndarray, labels: np.ndarray) -> float:
    """A collapsed or diverged model has no correlation: it scores 0, since NaN would poison means and selection."""
    has_one = all(np.isfinite(values).all() and np.ptp(values) > 0 for values in (predictions, labels))
    return float(statistic(predictions, labels).statistic) if has_one else 0.0
