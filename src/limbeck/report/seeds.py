"""Runs of several seeds: which belong together, their mean, and what makes a comparison unfair."""

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from limbeck.report import tables
from limbeck.report.runs import Run

HEADINGS = ("recipe", "task", "metric", "student", "teacher", "retention", "runs")
COMMON = ("data", "teacher", "student", "layers", "width", "decoder_layers")  # of a request; recipes may differ


def averages(runs: Sequence[tuple[str, Run]]) -> list[dict[str, str]]:
    """A row for every set of finished runs, given by name, that differ by the seed alone; none if all stand alone."""
    groups: dict[str, list[tuple[str, Run]]] = {}
    for name, run in runs:
        if run.scores.get("student") is not None:
            groups.setdefault(_but_for_the_seed(run), []).append((name, run))
    return [_average(group) for group in groups.values()] if any(len(g) > 1 for g in groups.values()) else []


def unlike(runs: Sequence[Run]) -> list[str]:
    """What was not the same for all runs that have a teacher: `data.few`, `teacher`, `layers`."""
    asked = [dict(_flat({key: run.request.get(key) for key in COMMON})) for run in runs if run.request.get("teacher")]
    names = dict.fromkeys(name for one in asked for name in one)
    return [name for name in names if len({json.dumps(one.get(name)) for one in asked}) > 1]


def _but_for_the_seed(run: Run) -> str:
    asked = {key: value for key, value in run.request.items() if key not in ("seed", "fingerprint")}
    return json.dumps([run.recipe, asked], sort_keys=True)


def _average(group: Sequence[tuple[str, Run]]) -> dict[str, str]:
    scores = [run.scores for _, run in group]
    students = [one["student"] for one in scores]
    spread = f" ± {stdev(students):.2f}" if len(students) > 1 else ""
    return {
        **tables.cells(scores[0]),
        "student": tables.number(mean(students)) + spread,
        "teacher": tables.number(_mean(scores, "teacher")),
        "retention": tables.number(_mean(scores, "retention"), " %"),
        "runs": ", ".join(name for name, _ in group),
    }


def _mean(scores: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [one[name] for one in scores if one.get(name) is not None]
    return mean(values) if values else None


def _flat(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
