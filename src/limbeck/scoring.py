"""What scores.json says: teacher and student on every evaluation set, their sizes and their speed."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from limbeck import efficiency, evaluation
from limbeck.data.encoding import Encoded
from limbeck.data.kinds import KINDS
from limbeck.distiller import Distiller
from limbeck.engine.held_out import held_out_loss
from limbeck.engine.loop import Scores
from limbeck.prepare import Prepared

BySplit = dict[str, dict[str, Scores]]  # the scores of the models, by evaluation set


def score_stage(prepared: Prepared, distiller: Distiller, student: PreTrainedModel, data: Encoded) -> Scores:
    """The scores of a student, if there are any; of one that predicts nothing, the loss of the stage."""
    if KINDS[prepared.task.kind].bare:
        batch = prepared.stages[distiller.stage].batch
        return {"loss": held_out_loss(distiller, data, batch=batch, longest=prepared.longest)}
    return {} if data.right is None else evaluation.evaluate(student, data, prepared.task)


def score_bodies(prepared: Prepared, device: torch.device) -> BySplit:
    """What a student that predicts nothing scores. Every process calls this: the loss may need all of them, of models
    cut over processes and of terms that look at the whole batch."""
    last = prepared.distillers[-1].to(device)
    return {
        split: {"student": score_stage(prepared, last, prepared.student, data)}
        for split, data in prepared.evals.items()
    }


def score_run(
    prepared: Prepared, scored: BySplit | None, device: torch.device, *, total: float, per_stage: Sequence[float]
) -> dict[str, Any]:
    """What scores.json says of a run that took `total` seconds; what is `scored` already is not scored again."""
    task, kind = prepared.task, KINDS[prepared.task.kind]
    models = {"teacher": prepared.teacher, "student": prepared.student}
    present = {name: model.to(device) for name, model in models.items() if model is not None}  # type: ignore[arg-type]
    scored = scored or _scored(prepared, present)
    first = next(iter(prepared.evals))  # the one that selections are made on
    split = "test" if "test" in scored else first
    here = scored.get(split, {})
    metric = task.metrics[0] if task.metrics else None  # files without labels
    teacher, student = (here.get(who, {}).get(metric or "") for who in ("teacher", "student"))
    lower, right = evaluation.lower_is_better(task), prepared.evals[split].right
    selects = bool(scored.get(first)) and prepared.keeps(len(prepared.stages) - 1) == "best"
    return {
        "task": task.name,
        "metric": metric,
        "teacher": teacher,
        "student": student,
        "retention": None if student is None else evaluation.retention(student, teacher, lower=lower),
        "single_answer": None if student is None else evaluation.best_single_answer(task, right),
        "lower": list(kind.lower),
        "metrics": {who: here.get(who, {}) for who in models},
        "splits": {other: scores for other, scores in scored.items() if other != split},
        "split": split,
        "selected_on": first if selects else None,
        "params": {who: efficiency.parameters(model) if model is not None else None for who, model in models.items()},
        "latency_ms": _latency(present, prepared.train, device),
        "ood": {},
        "seed": prepared.request.seed,
        "recipe": prepared.request.recipe.name,
        "seconds": {
            "total": round(total, 2),
            "per_stage": {stage.name: round(spent, 2) for stage, spent in zip(prepared.stages, per_stage)},
        },
    }


def _scored(prepared: Prepared, models: Mapping[str, PreTrainedModel]) -> BySplit:
    return {
        split: {who: evaluation.evaluate(model, data, prepared.task) for who, model in models.items()}
        for split, data in prepared.evals.items()
        if data.right is not None
    }


def _latency(models: Mapping[str, PreTrainedModel], data: Encoded, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a forward of one example, and what was measured."""
    batch = efficiency.typical_batch(data)
    rows, length = batch["input_ids"].shape
    timed = efficiency.latency(models, dict.fromkeys(models, batch))
    return {**timed, "batch": rows, "length": length, "device": device.type}
