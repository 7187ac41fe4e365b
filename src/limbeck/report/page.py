"""One HTML page about one or more runs, that needs nothing beside itself: no network, no script, no other file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from limbeck.errors import LimbeckError
from limbeck.folder import check_file, write_text
from limbeck.report import figures, seeds, tables
from limbeck.report.runs import Run, read_run


@dataclass(frozen=True)
class Section:
    """What the page shows of one run."""

    name: str
    seed: str
    finished: bool
    cells: dict[str, str]
    highlights: list[tuple[str, str, str]]  # what, value, explanation
    warning: str | None
    bars: list[figures.Bar]
    stages: list[figures.Stage]
    recipe: str
    environment: dict[str, str]


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write the page about `runs` (run folders, finished or not) to the file `out`, and return it."""
    if not runs:
        raise LimbeckError("a report needs at least one run folder: limbeck report RUN…")
    out = Path(out)
    check_file(out, "--out")
    folders = [read_run(path) for path in runs]
    names = _names(folders)
    html = _template().render(
        sections=[_section(run, name) for run, name in zip(folders, names)],
        averages=seeds.averages(list(zip(names, folders))),
        average_headings=seeds.HEADINGS,
        unlike=seeds.unlike(folders),
        headings=list(tables.cells({})),
        frame=figures.FRAME,
    )
    write_text(out, html)
    return out


@cache
def _template() -> Template:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("page.html")


def _section(run: Run, name: str) -> Section:
    measured = run.scores.get("metrics") or {}
    cells = tables.cells(run.scores)
    return Section(
        name=name,
        seed=str(run.scores.get("seed", tables.NOTHING)),
        finished=bool(run.scores),
        cells=cells,
        highlights=_highlights(run.scores, cells) if run.scores else [],
        warning=tables.nothing_learnt(run.scores),
        bars=figures.bars(measured, run.scores.get("lower", ())),
        stages=figures.stages(run.metrics, measured.get("teacher") or {}),
        recipe=run.recipe,
        environment={key: _plain(value) for key, value in run.environment.items()},
    )


def _highlights(scores: dict[str, Any], cells: dict[str, str]) -> list[tuple[str, str, str]]:
    """What a visitor came for: how good, how much of the teacher, how small, how fast."""
    shown = [(cells["metric"], cells["student"], f"{cells['task']}, {scores.get('split', 'evaluation')} split")]
    if scores.get("retention") is not None:
        shown.append(("kept", f"{scores['retention']:.1f} %", f"of the teacher's {cells['teacher']}"))
    params = scores.get("params") or {}
    if params.get("teacher"):
        share = f"{100 * params['student'] / params['teacher']:.0f} %"
        sizes = f"{tables.count(params['student'])} of {tables.count(params['teacher'])} parameters"
        shown.append(("size", share, sizes))
    elif params.get("student"):
        shown.append(("size", tables.count(params["student"]), "parameters"))
    latency = scores.get("latency_ms") or {}
    setting = ", ".join(f"{key} {latency[key]}" for key in ("batch", "length", "device") if key in latency)
    if latency.get("teacher"):
        shown.append(("speed", f"{latency['teacher'] / latency['student']:.1f}×", f"the teacher's; {setting}"))
    elif latency.get("student"):
        shown.append(("latency", f"{tables.number(latency['student'])} ms", setting))
    return shown


def _names(runs: Sequence[Run]) -> list[str]:
    """Folder names, or whole paths where two runs share one."""
    names = [run.path.resolve().name for run in runs]
    return [name if names.count(name) == 1 else str(run.path) for run, name in zip(runs, names)]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
