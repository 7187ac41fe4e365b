"""Runs side by side: the same cells for the terminal, for Markdown and for the page."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

Scores = Mapping[str, Any]
NOTHING = "–"
SHORT = {"retention": "kept", "parameters": "params", "latency, ms": "ms"}  # a terminal is narrow
NARROWED = ("parameters", "latency, ms", "time")  # 1m40s, 1.84/2.90: with spaces, 80 columns would cut them off


def cells(scores: Scores) -> dict[str, str]:
    """One row of the comparison, from a run's `scores.json`; what it lacks is a dash."""
    return {
        "recipe": scores.get("recipe") or NOTHING,
        "task": scores.get("task") or NOTHING,
        "metric": scores.get("metric") or NOTHING,
        "student": number(scores.get("student")),
        "teacher": number(scores.get("teacher")),
        "retention": number(scores.get("retention"), " %"),
        "parameters": _pair(scores.get("params"), count),
        "latency, ms": _pair(scores.get("latency_ms"), number),
        "time": duration((scores.get("seconds") or {}).get("total")),
    }


def nothing_learnt(scores: Scores) -> str | None:
    """A word on a model that does no better than one that reads nothing: the teacher, or else the student, whatever
    share of the teacher's score it keeps."""
    floor, teacher, student = (scores.get(name) for name in ("single_answer", "teacher", "student"))
    if floor is None:
        return None
    said = f"The same answer for every example would have {scores['metric']} {floor:.2f}"
    if teacher is not None and teacher <= floor:
        return (
            f"{said}, and the teacher has no more than that: it does not know this task. Was it trained on such texts, "
            "with these labels in this order (--labels) and as many tokens (--max-length)?"
        )
    if student is not None and student <= floor:
        return f"{said}: this student has learnt nothing yet. Train longer, or with another learning rate."
    return None


def comparison(rows: Sequence[Scores]) -> Table:
    """A table for the terminal, a row for each `scores.json`; pairs read student / teacher.

    What is the same in every row stands above it.
    """
    shown = [cells(scores) for scores in rows]
    common = [name for name in ("task", "metric") if len({row[name] for row in shown}) == 1]
    table = Table(
        title=", ".join(shown[0][name] for name in common) if common else None,
        caption="pairs: student / teacher" if rows else None,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    headings = [heading for heading in cells({}) if heading not in common]
    for heading in headings:
        left = heading in ("recipe", "task", "metric")
        table.add_column(SHORT.get(heading, heading), justify="left" if left else "right", no_wrap=True)
    for row in shown:
        narrow = {**row, **{name: row[name].replace(" min", "m").replace(" ", "") for name in NARROWED}}
        table.add_row(*(Text(narrow[heading]) for heading in headings))
    return table


def metrics_markdown(scores: Scores) -> str:
    """Every metric of one run as Markdown, beside the teacher's where there was one."""
    measured = scores.get("metrics") or {}
    student, teacher = measured.get("student") or {}, measured.get("teacher") or {}
    if not teacher:
        return markdown(["metric", "score"], [[name, number(value)] for name, value in student.items()])
    rows = [[name, number(value), number(teacher.get(name))] for name, value in student.items()]
    return markdown(["metric", "student", "teacher"], rows)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; a cell may hold anything."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def number(value: float | None, unit: str = "") -> str:
    """Two decimals, trailing zeros kept so that columns line up; a dash for what was not measured."""
    return NOTHING if value is None else f"{value:.2f}{unit}"


def count(value: int | None) -> str:
    """`22.7M`, `4.4k`."""
    if value is None:
        return NOTHING
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return str(value)


def duration(seconds: float | None) -> str:
    """`48 s`, `12 min 5 s`, `3 h 20 min`."""
    if seconds is None:
        return NOTHING
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _pair(values: Mapping[str, Any] | None, show: Callable[[Any], str]) -> str:
    sides = [(values or {}).get(side) for side in ("student", "teacher")]
    return " / ".join(show(value) for value in sides if value is not None) or NOTHING
