"""What the comparisons of recipes share: options, worker processes, and what they leave behind."""

import json
import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def words(text: str) -> list[str]:
    """What is between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[float]:
    """The same, as numbers."""
    return [float(word) for word in words(text)]


def seeds(text: str) -> list[int]:
    """The same, as whole numbers."""
    return [int(word) for word in words(text)]


def limbeck_in(workers: int) -> Any:
    """limbeck, in a process that leaves cores to as many others."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    import limbeck

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    return limbeck


def spread(values: list[float], digits: int = 1) -> str:
    """Mean ± standard deviation."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def save(results: str, header: list[str], lines: Iterable[list[str]], **data: Any) -> str:
    """Leave raw data and table as RESULTS.json and RESULTS.md, name the machine, and return the table."""
    from limbeck.report.tables import markdown
    from limbeck.run import environment

    machine = {key: value for key, value in environment().items() if key != "command"}
    target = Path(results)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**data, "environment": machine}, indent=1)
    target.with_suffix(".json").write_text(text + "\n", encoding="utf8")
    table = markdown(header, list(lines))
    target.with_suffix(".md").write_text(table + "\n", encoding="utf8")
    return table
