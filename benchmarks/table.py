"""One table of several result files: a comparison that took more than one run.

    python benchmarks/table.py docs/results/mpnet-12-to-3*.json

Reads what `quality.py` and `language.py` wrote. Where two files hold the same recipe, task and seed, the last one
counts. What was run anew, since the recipes had changed, takes the place of all seeds of its recipe and task; teachers
remain, since the other recipes are theirs. Prints mean ± standard deviation over seeds; of several tasks the best mean
first.
"""

import argparse
import json
import statistics
from pathlib import Path

from comparison import spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--anew", type=Path, metavar="FILE", help="recipes that were run once more")
    parser.add_argument("--digits", type=int, default=1)
    parser.add_argument("--columns", help="these alone, between commas")
    args = parser.parse_args()
    rows = [row for file in args.files for row in rows_of(file)]
    if args.anew:
        anew = [row for row in rows_of(args.anew) if row["recipe"] != "teacher"]
        replaced = {(row["recipe"], row["task"]) for row in anew}
        rows = [row for row in rows if (row["recipe"], row["task"]) not in replaced] + anew
    print(table(rows, args.columns.split(",") if args.columns else [], args.digits))


def rows_of(file: Path) -> list[dict]:
    return json.loads(file.read_text("utf8"))["rows"]


def table(rows: list[dict], columns: list[str], digits: int) -> str:
    """A line a recipe, a column a score."""
    from limbeck.report.tables import markdown

    found: dict[str, dict[str, dict[int, float]]] = {}  # recipe → score → seed → value
    one_task = len({row.get("task") for row in rows}) == 1
    for row in rows:
        for name, value in scores(row, one_task).items():
            found.setdefault(row["recipe"], {}).setdefault(name, {})[row["seed"]] = value
    columns = columns or list(dict.fromkeys(name for recipe in found.values() for name in recipe))
    if one_task:
        return markdown(["recipe", *columns], [line(recipe, named, columns, digits) for recipe, named in found.items()])
    whole = {recipe: mean(named) for recipe, named in found.items() if set(columns) <= set(named)}
    order = [*sorted(whole, key=lambda recipe: -whole[recipe]), *(recipe for recipe in found if recipe not in whole)]
    means = {recipe: f"{value:.{digits}f}" for recipe, value in whole.items()}
    cells = [[*line(recipe, found[recipe], columns, digits), means.get(recipe, "–")] for recipe in order]
    return markdown(["recipe", *columns, "mean"], cells)


def line(recipe: str, named: dict[str, dict[int, float]], columns: list[str], digits: int) -> list[str]:
    return [recipe, *(spread(list(named[name].values()), digits) if name in named else "–" for name in columns)]


def scores(row: dict, one_task: bool) -> dict[str, float]:
    """A row's numbers by name: of one task every metric, of several the main one of each."""
    if "scores" in row:
        return row["scores"]
    return row["metrics"]["student"] if one_task else {row["task"]: row["student"]}


def mean(named: dict[str, dict[int, float]]) -> float:
    return statistics.mean(statistics.mean(values.values()) for values in named.values())


if __name__ == "__main__":
    main()
