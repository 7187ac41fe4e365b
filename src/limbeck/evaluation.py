"""How good a model is: its predictions, its metrics, and how much of the teacher it keeps."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from limbeck import architectures
from limbeck.data import kinds
from limbeck.data.encoding import Encoded
from limbeck.data.kinds.seq2seq import Written
from limbeck.data.plan import bucket, padded
from limbeck.data.tasks import Task
from limbeck.errors import LimbeckError, did_you_mean
from limbeck.features import LOGITS
from limbeck.models import quiet
from limbeck.taps import Tap
from limbeck.vocabulary import Predictor, loss_and_best, told

TOKENS = 2**14  # of a batch, at most


def measure(task: Task, logits: np.ndarray, right: Any) -> dict[str, float]:
    """Every metric of `task`, on the 0–100 scale; `right` is what `Encoded.right` holds, such as labels.

    Those of which less is better, such as perplexity, are as they are. A correlation with constant or non-finite
    predictions is 0.
    """
    kind = kinds.KINDS[task.kind]
    if len(logits) == 0:
        raise LimbeckError(f"task {task.name} has no example to score. Give an evaluation split with at least one row.")
    unknown = [name for name in task.metrics if name not in kind.metrics]
    if unknown:
        raise LimbeckError(
            f"task {task.name} asks for the metric {unknown[0]!r}; there are {', '.join(kind.metrics)}."
            + did_you_mean(unknown[0], kind.metrics)
        )
    predictions, expected = kind.decided(logits, task.labels, right), kind.expected(right, task.labels)
    found = {name: float(kind.metrics[name](predictions, expected)) for name in task.metrics}
    return {name: value if name in kind.lower else 100 * value for name, value in found.items()}


def predict(
    model: PreTrainedModel,
    encoded: Encoded,
    *,
    device: torch.device | str | None = None,
    batch_size: int = 64,
    precision: torch.dtype | None = None,
) -> Any:
    """The logits of every example, or of every token, in the order of `encoded`, as float32; where words are
    predicted, the loss and the likeliest word of every token instead, and the texts of a model that writes some.

    Runs without dropout and leaves every module in the mode it was found in. `device` moves the model there first;
    by default it runs where it is. `precision` turns on autocast to that type; by default the model's own is used.
    """
    if len(encoded) == 0:
        raise LimbeckError("there is no example to predict. Give data with at least one row.")
    if device is not None:
        model.to(device)  # pyright: ignore[reportArgumentType] -- transformers hides the signature
    lengths, by_length = encoded.lengths, encoded.by_length
    batch_size = max(1, min(batch_size, TOKENS // int(lengths.max())))
    autocast = torch.autocast(model.device.type, dtype=precision, enabled=precision is not None)
    kind, rows, texts = kinds.of(model), [], {}
    tap = Tap(model, [("logits", LOGITS)]) if kind.vocabulary else None
    # Not in inference mode: weights that a sharded model gathers there could not be trained afterwards.
    with evaluating(model), torch.no_grad(), autocast:
        for start in range(0, len(by_length), batch_size):
            ids = by_length[start : start + batch_size]
            batch = encoded.batch(ids, padded(lengths[ids], int(lengths.max())))
            if tap is None:
                logits = kind.logits(model(**arguments(model, batch))).float()
            else:
                logits = _told(tap, kind, {name: column.to(model.device) for name, column in batch.items()})
            mask = batch["decoder_attention_mask" if kind.writes else "attention_mask"].bool()
            rows.append(logits[mask] if kind.per_token else logits)
            if kind.writes:
                texts |= dict(zip(ids.tolist(), _written(model, encoded, batch), strict=True))
    logits = torch.cat(rows).cpu().numpy()
    ordered = np.empty_like(logits)
    ordered[_tokens(encoded.targets or encoded, by_length) if kind.per_token else by_length] = logits
    return Written([texts[i] for i in range(len(encoded))], ordered) if kind.writes else ordered


def evaluate(model: PreTrainedModel, encoded: Encoded, task: Task, **options: Any) -> dict[str, float]:
    """The scores of `model` on labelled examples; `options` are those of `predict`."""
    if encoded.right is None:
        raise LimbeckError(f"task {task.name}: these examples have no labels, so they cannot be scored.")
    return measure(task, predict(model, encoded, **options), encoded.right)


def retention(student: float, teacher: float | None, *, lower: bool = False) -> float | None:
    """The student's score in percent of the teacher's, or the other way round where a lower one is better; None without
    a teacher, or where it scores 0 or below."""
    if teacher is None or teacher <= 0:
        return None
    return 100 * teacher / student if lower else 100 * student / teacher


def best_single_answer(task: Task, right: np.ndarray) -> float | None:
    """What the main metric gives for one class, the best one, on every example; None where answers are not classes."""
    if task.kind != "classification" or not task.metrics:
        return None
    metric = kinds.KINDS[task.kind].metrics[task.metrics[0]]
    return 100 * max(float(metric(np.full_like(right, label), right)) for label in range(len(task.labels)))


def lower_is_better(task: Task) -> bool:
    """Whether less of a task's main metric is better."""
    return bool(task.metrics) and task.metrics[0] in kinds.KINDS[task.kind].lower


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
    there = {name: column.to(model.device, non_blocking=True) for name, column in batch.items()}
    return architectures.arguments(model, there)


def _told(tap: Tap, kind: kinds.Kind, batch: dict[str, Tensor]) -> Tensor:
    logits, labels = tap(**batch)["logits", LOGITS].values, kind.targets(batch)
    if labels is None:
        raise LimbeckError("these texts have no labels, so the words predicted cannot be scored.")
    return told(logits, labels) if isinstance(logits, Predictor) else loss_and_best(logits, labels)


def _written(model: Any, encoded: Encoded, batch: Mapping[str, Tensor]) -> list[str]:
    """What the model writes for each text, the likeliest token at a time, about as long at most as the longest right
    text."""
    if encoded.targets is None or encoded.tokenizer is None:
        raise LimbeckError("these texts are not encoded for a model that writes.")
    limit = bucket(int(encoded.targets.lengths.max()), architectures.positions(model.config))
    columns = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
    with quiet():
        ids = model.generate(**columns, do_sample=False, num_beams=1, max_new_tokens=limit)
    return encoded.tokenizer.batch_decode(ids, skip_special_tokens=True)


def _tokens(encoded: Encoded, ids: np.ndarray) -> np.ndarray:
    """The places of these examples' tokens."""
    return np.concatenate([np.arange(*encoded.offsets[i : i + 2].tolist()) for i in ids])
