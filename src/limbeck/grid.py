"""`limbeck finetune --grid`: every combination of some values, each a run folder, and which of them is best."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from limbeck.errors import LimbeckError
from limbeck.recipe import resolve
from limbeck.run import Run, finetune
from limbeck.spec import allowing

SHORT = ("lr", "batch", "epochs")  # of every stage


@dataclass(frozen=True)
class Cell:
    """One combination: its values but for the seed, and a run for each seed."""

    values: dict[str, str]
    runs: list[Run]

    @property
    def scores(self) -> list[float]:
        """The main metric of each run."""
        return [run.scores["student"] for run in self.runs]

    @property
    def best(self) -> Run:
        """The run of the best seed."""
        return max(self.runs, key=lambda run: run.scores["student"] * _sign(run))


def run_grid(
    model: str | Path, grid: Iterable[str], *, out: str | Path, seed: int = 42, set: Iterable[str] = (), **options: Any
) -> list[Cell]:
    """Fine-tune `model` with every combination of the grid's values; the best combination, by the mean over its seeds,
    comes first. `grid` is as on the command line, such as `["lr=1e-5,3e-5", "seed=1,2"]`; the rest as in `finetune`."""
    combinations = _combinations(_axes(grid))
    with allowing(bool(options.get("allow_code"))):
        for one in combinations:
            resolve("finetune", overrides=[*set, *_changes(one)])  # a fault of the last shows before the first is run
    cells = []
    for values, several in groupby(combinations, key=lambda one: {k: v for k, v in one.items() if k != "seed"}):
        runs = [
            finetune(
                model,
                out=Path(out) / ",".join(f"{name}={value}" for name, value in one.items()),
                seed=int(one.get("seed", seed)),
                set=[*set, *_changes(one)],
                **options,
            )
            for one in several
        ]
        cells.append(Cell(values, runs))
    return sorted(cells, key=lambda cell: mean(cell.scores) * _sign(cell.best), reverse=True)


def shown(cells: list[Cell]) -> Table:
    """The grid as a table, best first."""
    several = len(cells[0].runs) > 1
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in (*cells[0].values, cells[0].best.scores["metric"]):
        table.add_column(name, justify="right")
    for cell in cells:
        spread = f" ± {stdev(cell.scores):.2f}" if several else ""
        table.add_row(*cell.values.values(), f"{mean(cell.scores):.2f}{spread}")
    return table


def named(cells: list[Cell]) -> str:
    """A line that names the best run; not in the table, whose width would cut the path."""
    several = ", of several seeds; scores are mean ± deviation" if len(cells[0].runs) > 1 else ""
    return f"best: {cells[0].best.folder}{several}"


def _axes(grid: Iterable[str]) -> dict[str, list[str]]:
    axes: dict[str, list[str]] = {}
    for axis in grid:
        name, _, listed = axis.partition("=")
        values = [value.strip() for value in listed.split(",") if value.strip()]
        if not name or not values or (name not in (*SHORT, "seed") and "." not in name):
            raise LimbeckError(
                f'--grid "{axis}" is no list of values. Write a name and what to try: --grid lr=1e-5,3e-5 --grid '
                "batch=16,32. Names are lr, batch, epochs, seed, or a path as for --set: stages.finetune.warmup=0,0.1."
            )
        if name in axes or len({*values}) < len(values):
            raise LimbeckError(f'--grid "{axis}" names {"an axis" if name in axes else "a value"} twice. Name it once.')
        axes[name] = values
    if not all(seed.isdigit() for seed in axes.get("seed", [])):
        raise LimbeckError(f"--grid seed={','.join(axes['seed'])}: seeds are whole numbers from 0 on.")
    return axes


def _combinations(axes: dict[str, list[str]]) -> list[dict[str, str]]:
    """Every combination; those that differ by the seed alone stand together."""
    ordered = sorted(axes, key=lambda name: name == "seed")
    return [dict(zip(ordered, values)) for values in product(*(axes[name] for name in ordered))]


def _changes(values: dict[str, str]) -> list[str]:
    """A combination as --set takes it."""
    paths = {name: f"stages.*.{name}" if name in SHORT else name for name in values if name != "seed"}
    return [f"{path}={values[name]}" for name, path in paths.items()]


def _sign(run: Run) -> int:
    """1 where more of the main metric is better, -1 where less is."""
    return -1 if run.scores["metric"] in run.scores["lower"] else 1
