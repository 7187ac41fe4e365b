import pytest

from limbeck import LimbeckError, grid
from limbeck.grid import named, run_grid
from limbeck.run import Run
from tests import toy


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """What would be run, and scores that favour a high rate and a small batch."""
    asked = []

    def finetune(model, *, out, seed, set, metric="accuracy", lower=(), **options):
        asked.append((model, out, seed, set, options))
        values = dict(change.rpartition(".")[2].split("=") for change in set)
        score = 1e6 * float(values["lr"]) - float(values["batch"]) / 100 + seed
        return Run(out, {"student": score, "metric": metric, "lower": list(lower)})

    monkeypatch.setattr(grid, "finetune", finetune)
    return asked


GRID = ["seed=1,2", "lr=1e-5,3e-5", "batch=16,32"]


def test_every_combination_is_run_once_and_the_best_comes_first(runs, tmp_path):
    cells = run_grid("m", GRID, out=tmp_path, set=["stages.*.warmup=0"], layers=3, resume=True)
    assert len(runs) == len({str(out) for _, out, *_ in runs}) == 8
    assert runs[0] == (
        "m",
        tmp_path / "lr=1e-5,batch=16,seed=1",
        1,
        ["stages.*.warmup=0", "stages.*.lr=1e-5", "stages.*.batch=16"],
        {"layers": 3, "resume": True},
    )
    assert cells[0].values == {"lr": "3e-5", "batch": "16"}
    assert cells[0].best.folder.name == "lr=3e-5,batch=16,seed=2"
    assert [sum(cell.scores) for cell in cells] == sorted([sum(cell.scores) for cell in cells], reverse=True)
    assert "lr=3e-5,batch=16,seed=2" in named(cells)


def test_where_less_is_better_the_least_comes_first(runs, tmp_path):
    cells = run_grid("m", GRID, out=tmp_path, metric="perplexity", lower=("perplexity",))
    assert cells[0].values == {"lr": "1e-5", "batch": "32"}
    assert cells[0].best.folder.name == "lr=1e-5,batch=32,seed=1"


@pytest.mark.parametrize(
    ("axis", "fault"),
    [
        (["lr"], "no list of values"),
        (["lr="], "no list of values"),
        (["rate=1,2"], "no list of values"),
        (["lr=1e-5", "lr=2e-5"], "an axis twice"),
        (["lr=1e-5,1e-5"], "a value twice"),
        (["seed=one"], "whole numbers"),
        (["lr=1e-5,fast"], "'fast' does not fit. Allowed: a number"),
    ],
)
def test_faults_of_grids(axis, fault, tmp_path):
    with pytest.raises(LimbeckError, match=fault):
        run_grid("m", axis, out=tmp_path)


def test_a_grid_goes_on_where_it_stopped(tmp_path):
    """By command: two runs, and with --resume nothing is run again."""
    asked = toy.options(model=toy.teacher("bert"), out=tmp_path / "grid", set="stages.*.steps=2", **toy.data())
    done = toy.command("finetune", *asked, "--grid", "lr=1e-3,1e-4")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "grid").iterdir()) == ["lr=1e-3", "lr=1e-4"]
    assert any(line.startswith(f"best: {tmp_path / 'grid'}") for line in done.stdout.splitlines())  # in one piece
    again = toy.command("finetune", *asked, "--grid", "lr=1e-3,1e-4", "--resume")
    assert again.stderr.count("is finished") == 2
    assert again.stdout == done.stdout
