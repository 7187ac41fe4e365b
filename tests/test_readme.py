"""The README's examples run as they stand, links of all pages lead somewhere, and tables are those of raw results."""

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

import pytest

from limbeck.data import grammar
from tests import toy

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf8")


def example(name: str) -> str:
    return re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", README, flags=re.DOTALL).group(1)


@pytest.mark.parametrize("name", ["distill", "distiller"])
def test_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    grammar.write(tmp_path, train=48, dev=16)
    toy.save(toy.model(), tmp_path / "teacher")
    code = example(name)
    assert len(code.strip().splitlines()) <= 20
    exec(compile(code, f"README.md ({name})", "exec"), {})
    printed = capsys.readouterr().out
    assert ("the student is in" if name == "distill" else "match") in printed


def test_layer_weights_of_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """As docs/architecture.md asks for them; what the run has learnt is in them."""
    monkeypatch.chdir(tmp_path)
    grammar.write(tmp_path, train=48, dev=16)
    toy.save(toy.model(), tmp_path / "teacher")
    toy.distill(
        "ckd-combine", Path("runs/ckd"), teacher="teacher", set=("stages.*.lr=0.1",), train="train.csv", eval="dev.csv"
    )
    page = (ROOT / "docs" / "architecture.md").read_text("utf8")
    code = re.search(r"<!-- example: layer weights -->\n```python\n(.*?)```", page, flags=re.DOTALL).group(1)
    exec(compile(code, "architecture.md (layer weights)", "exec"), {})
    assert "tensor([[" in (printed := capsys.readouterr().out)
    assert "0.5000" not in printed  # two layers to a map, which began as their mean


def test_every_recipe_is_named() -> None:
    from limbeck.recipe import shipped

    missing = [name for name in shipped() if f"`{name}`" not in README]
    assert not missing


def test_every_file_is_in_the_tree() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf8")
    tree = re.search(r"## The tree\n.*?```text\n(.*?)```", page, flags=re.DOTALL).group(1)
    package = ROOT / "src" / "limbeck"
    shown = [*package.glob("*.py"), *package.glob("data/*.py"), *package.glob("engine/*.py")]
    assert not [
        path.stem for path in shown if path.stem.strip("_") == path.stem and path.stem not in re.findall(r"\w+", tree)
    ]


def test_links_lead_somewhere() -> None:
    """Above all to the raw results that numbers rest on."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf8"))]
    assert len(links) > 50
    assert not [(page.name, link) for page, link in links if "://" not in link and not (page.parent / link).exists()]


PERPLEXITIES = "wikitext-2 perplexity,wikitext-2 accuracy,wikitext-103 perplexity,wikitext-103 accuracy"


@pytest.mark.parametrize(
    ("files", "options"),
    [
        (
            ("mpnet-12-to-3", "mpnet-12-to-3-more", "mpnet-12-to-3-rest", "mpnet-12-to-3-again-cola"),
            ("--anew", "mpnet-12-to-3-again.json", "--columns", "rte,mrpc,stsb,cola"),
        ),
        (("squad-12-to-6", "squad-12-to-6-more"), ()),
        (
            ("stories-6-to-3", "stories-6-to-3-more"),
            ("--digits", "2", "--columns", f"{PERPLEXITIES},lambada accuracy"),
        ),
    ],
)
def test_tables_of_results_are_those_of_the_raw_numbers(files: tuple[str, ...], options: tuple[str, ...]) -> None:
    folder = ROOT / "docs" / "results"
    script = [sys.executable, ROOT / "benchmarks" / "table.py", *(folder / f"{file}.json" for file in files), *options]
    rows = (
        subprocess.run(script, capture_output=True, text=True, check=True, cwd=folder).stdout.strip().splitlines()[2:]
    )
    assert len(rows) >= 5
    page = (folder / "README.md").read_text("utf8").splitlines()
    assert not [row for row in rows if row not in page]


def backed() -> dict[tuple[str, str], set[str]]:
    """Of every recipe and task, the numbers that comparisons of MPNet's students give: a file's mean ± deviation."""
    numbers: dict[tuple[str, str], set[str]] = {}
    for file in (ROOT / "docs" / "results").glob("mpnet-12-to-3*.json"):
        scores: dict[tuple[str, str], list[float]] = {}
        for row in json.loads(file.read_text("utf8"))["rows"]:
            scores.setdefault((row["recipe"], row["task"]), []).append(row["student"])
        for place, values in scores.items():
            deviation = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
            numbers.setdefault(place, set()).add(f"{mean(values):.1f}{deviation}")
    return numbers


TASKS = {"RTE": "rte", "MRPC": "mrpc", "STS-B": "stsb", "CoLA": "cola"}
STAGES = {"labels": "finetune", "labels and predictions": "kd", "predictions": "tinybert"}  # that stands for them


def test_tables_of_reasons_are_those_of_the_raw_numbers() -> None:
    """Each cell is what some file gives for its row's recipe and its column's task, or that of a column before."""
    page = (ROOT / "docs" / "results" / "README.md").read_text("utf8")
    section = page[page.index("| finetune, second teachers") : page.index("## Question answering")].splitlines()
    numbers, tasks, checked, wrong = backed(), [*TASKS.values()], 0, []
    for line in section:
        row, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if row in ("recipe", "second stage"):
            tasks = []
            for head in cells:
                named = next((task for name, task in TASKS.items() if name in head), None)
                tasks.append(named or (tasks[-1] if tasks else "cola"))
        elif line.startswith("| "):
            name = re.split(r",| \(", row)[0]
            for cell, task in zip(cells, tasks):
                found = re.match(r"\d+\.\d( ± \d+\.\d)?", cell)
                checked += bool(found)
                wrong += [f"{row}: {cell}"] if found and found[0] not in numbers[STAGES.get(name, name), task] else []
    assert checked > 300
    assert not wrong
