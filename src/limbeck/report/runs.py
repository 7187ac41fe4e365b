"""What a run folder says: the files a run leaves behind, read as they are, whichever of them are there."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from limbeck.errors import LimbeckError


@dataclass(frozen=True)
class Run:
    """A run folder; what it does not hold yet is empty."""

    path: Path
    recipe: str
    request: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    scores: dict[str, Any]


def read_run(path: Path) -> Run:
    """Read a run folder, finished or not."""
    path = Path(path)
    if not any((path / name).is_file() for name in ("recipe.yaml", "metrics.jsonl", "scores.json")):
        raise LimbeckError(
            f"{path} is not a run folder: it holds no recipe.yaml, metrics.jsonl or scores.json. "
            "Give the folder that was --out of `limbeck distill` or `limbeck finetune`."
        )
    return Run(
        path=path,
        recipe=_text(path / "recipe.yaml"),
        request=_json(path / "request.json"),
        environment=_json(path / "environment.json"),
        metrics=_json_lines(path / "metrics.jsonl"),
        scores=_json(path / "scores.json"),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _json(path: Path) -> dict[str, Any]:
    text = _text(path)
    try:
        return json.loads(text) if text else {}
    except json.JSONDecodeError as fault:
        raise LimbeckError(f"{path} is not valid JSON ({fault}).") from None


def _json_lines(path: Path) -> list[dict[str, Any]]:
    lines = _text(path).splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as fault:
            # A killed run, or one that is writing now, ends in half a line.
            if number < len(lines):
                raise LimbeckError(f"{path}, line {number} is not valid JSON ({fault}).") from None
    return records
