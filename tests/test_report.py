"""The report reads run folders, complete or not, and writes a page that stands alone."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from limbeck.cli import main
from limbeck.errors import LimbeckError
from limbeck.report.card import model_card
from limbeck.report.figures import MOST_POINTS, bars, panel, stages
from limbeck.report.page import write_report
from limbeck.report.runs import read_run
from limbeck.report.tables import comparison, count, duration, markdown

RECIPE = {"name": "rail-kd-l", "init": ["layers(first)"], "stages": [{"name": "distil", "epochs": 2}]}
SCORES = {
    "task": "mrpc",
    "metric": "accuracy",
    "teacher": 88.0,
    "student": 84.04,
    "retention": 95.5,
    "metrics": {"teacher": {"accuracy": 88.0, "f1": 91.0}, "student": {"accuracy": 84.04, "f1": 89.1}},
    "split": "dev",
    "selected_on": "dev",
    "params": {"teacher": 22_700_000, "student": 12_100_000},
    "latency_ms": {"teacher": 6.1, "student": 3.05, "batch": 1, "length": 64, "device": "cpu"},
    "ood": {},
    "seed": 1,
    "recipe": "rail-kd-l",
    "seconds": {"total": 95.4, "per_stage": {"distil": 90.0}},
}
WITHOUT_TEACHER = {
    **SCORES,
    "teacher": None,
    "retention": None,
    "metrics": {"student": SCORES["metrics"]["student"]},
    "params": {"student": 12_100_000},
    "latency_ms": {"student": 3.05},
    "recipe": "finetune",
}
METRICS = [
    {"stage": "distil", "epoch": 0, "step": 10, "loss": 1.2, "labels": 0.6, "layers": 0.6, "lr": 1e-5},
    {"stage": "distil", "epoch": 0, "step": 20, "loss": 1.0, "labels": 0.5, "layers": 0.5, "lr": 5e-6},
    {"stage": "distil", "epoch": 0, "step": 20, "eval": {"accuracy": 71.0}},
]


def run_folder(path: Path, scores: dict | None = SCORES, metrics: list[dict] = METRICS, recipe: dict = RECIPE) -> Path:
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (path / "environment.json").write_text(json.dumps({"torch": "2.9.0", "gpu": None, "packages": {"numpy": "2.3"}}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
    if scores is not None:
        (path / "scores.json").write_text(json.dumps(scores))
    return path


class Tags(HTMLParser):
    """Checks that elements nest, and keeps every tag's name and attributes."""

    VOID = ("meta", "link", "img", "br", "hr", "input")

    def __init__(self, html: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def several(tmp_path) -> list[Path]:
    return [
        run_folder(tmp_path / "a"),
        run_folder(tmp_path / "b", WITHOUT_TEACHER),
        run_folder(tmp_path / "c", scores=None, metrics=[]),
    ]


def test_the_page_of_one_run_shows_it(tmp_path):
    run = run_folder(tmp_path / "run")
    page = write_report([run], run / "report.html")
    assert page == run / "report.html"
    html = page.read_text()
    for shown in (
        "84.04",
        "95.5 %",
        "53 %",
        "2.0×",
        "batch 1, length 64, device cpu",
        "layers(first)",
        "1 min 35 s",
    ):
        assert shown in html
    assert html.count("<polyline") == 5
    assert html.count('class="guide"') == 1
    assert sorted(path.name for path in run.iterdir()) == [
        "environment.json", "metrics.jsonl", "recipe.yaml", "report.html", "scores.json",
    ]  # fmt: skip


@pytest.mark.parametrize(("floor", "warned"), [(84.04, True), (84.0, False), (None, False)])
def test_page_and_card_tell_of_a_student_that_could_give_one_answer(tmp_path, floor, warned):
    scores = {**SCORES, "single_answer": floor}
    run = run_folder(tmp_path / "run", scores)
    told = "would have accuracy 84.04: this student has learnt nothing yet."
    assert (told in write_report([run], run / "report.html").read_text()) == warned
    assert (told in model_card(RECIPE, scores, [])) == warned


@pytest.mark.parametrize(("teacher", "told"), [(50.0, "teacher"), (70.0, "student"), (None, "student")])
def test_a_teacher_that_could_give_one_answer_is_told_first(tmp_path, teacher, told):
    scores = {**SCORES, "single_answer": 60.0, "teacher": teacher, "student": 55.0}
    card = model_card(RECIPE, scores, [])
    assert ("the teacher has no more than that: it does not know this task." in card) == (told == "teacher")
    assert ("this student has learnt nothing yet." in card) == (told == "student")


def test_the_page_of_several_runs_compares_them(several, tmp_path):
    html = write_report(several, tmp_path / "new" / "report.html").read_text()
    tags = Tags(html).found
    targets = {attributes["id"] for _, attributes in tags if "id" in attributes}
    links = [attributes["href"] for tag, attributes in tags if tag == "a"]
    assert len(links) == 3
    assert {str(link).removeprefix("#") for link in links} == targets
    assert "no scores yet" in html


def test_runs_that_differ_by_the_seed_alone_are_averaged(tmp_path):
    folders = []
    for seed, student, few in ((1, 80.0, 100), (2, 84.0, 100), (3, 90.0, 50)):
        folders.append(run_folder(tmp_path / f"run-{seed}", {**SCORES, "seed": seed, "student": student}))
        request = {"teacher": "t", "seed": seed, "fingerprint": str(seed), "data": {"task": "rte", "few": few}}
        (folders[-1] / "request.json").write_text(json.dumps(request))
    html = write_report(folders, tmp_path / "report.html").read_text()
    assert "82.00 ± 2.83" in html
    assert "run-1, run-2</td>" in html
    assert "the same: data.few." in html
    html = write_report(folders[1:], tmp_path / "report.html").read_text()
    assert "±" not in html.split("</section>")[0]
    assert "the same" not in write_report(folders[:2], tmp_path / "report.html").read_text()


def test_a_page_of_several_runs_leaves_their_own_pages_alone(several, monkeypatch, capsys):
    monkeypatch.chdir(several[0].parent)
    monkeypatch.setattr(sys, "argv", ["limbeck", "report", "a", "b"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out == "report.html\n"
    assert not Path("a", "report.html").exists()


def test_the_page_needs_nothing_beside_itself(several, tmp_path):
    html = write_report(several, tmp_path / "report.html").read_text()
    for tag, attributes in Tags(html).found:
        assert tag not in ("script", "link", "img", "iframe", "object")
        assert all(
            str(value).startswith("#") for name, value in attributes.items() if name.split(":")[-1] in ("src", "href")
        )
    assert not re.search(r"https?://|@import|url\(", html)


def test_names_are_escaped_everywhere(tmp_path):
    evil = '<script>alert("x")</script>&'
    scores = {**SCORES, "task": evil, "recipe": evil, "metric": evil, "metrics": {"student": {evil: 3.0}}}
    metrics = [{"stage": evil, "step": 1, evil: 1.0}, {"stage": evil, "step": 1, "eval": {evil: 2.0}}]
    run = run_folder(tmp_path / "<b>bold", scores, metrics, {"name": evil})
    (run / "environment.json").write_text(json.dumps({evil: {evil: evil}}))
    html = write_report([run, run], tmp_path / "report.html").read_text()
    names = {tag for tag, _ in Tags(html).found}
    assert not names & {"script", "b>bold"}
    assert evil not in html
    assert "&lt;script&gt;" in html


def test_a_killed_run_still_has_a_page(tmp_path):
    run = run_folder(tmp_path / "run", scores=None)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "distil", "loss": NaN, "step": 30}\n{"stage": "dist')
    assert len(read_run(run).metrics) == 4
    assert "1.2" in write_report([run], tmp_path / "report.html").read_text()


def test_folders_that_are_no_runs_are_refused(tmp_path):
    with pytest.raises(LimbeckError, match="not a run folder"):
        read_run(tmp_path)
    with pytest.raises(LimbeckError, match="at least one run"):
        write_report([], tmp_path / "report.html")
    run = run_folder(tmp_path / "run")
    (run / "scores.json").write_text("{")
    with pytest.raises(LimbeckError, match=r"scores\.json is not valid JSON"):
        read_run(run)
    (run / "scores.json").unlink()
    (run / "metrics.jsonl").write_text("half\n{}\n")
    with pytest.raises(LimbeckError, match=r"metrics\.jsonl, line 1"):
        read_run(run)


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = [run_folder(tmp_path / task / "seed1") for task in ("rte", "mrpc")]
    html = write_report(runs, tmp_path / "report.html").read_text()
    assert all(str(run) in html for run in runs)


def test_curves_stay_inside_their_panel_and_keep_their_shape():
    up = panel("loss", [(step, float(step)) for step in range(10_000)], guide=-50.0)
    assert len(up.points) <= MOST_POINTS
    assert all(46 <= x <= 292 and 8 <= y <= 128 for x, y in up.points)
    assert up.points == sorted(up.points, key=lambda point: (point[0], -point[1]))
    assert up.guide == pytest.approx(128)
    assert up.last == "9999"
    assert [label for _, label in up.x_ticks] == ["2000", "4000", "6000", "8000"]


@pytest.mark.parametrize("points", [[(5, 3.0)], [(1, 0.0), (2, 0.0)], [(0, 1e-9), (1, 3e7)], [(0, -2.0), (9, -1.0)]])
def test_curves_of_awkward_values_have_ticks(points):
    drawn = panel("loss", points)
    assert drawn.x_ticks
    assert 2 <= len(drawn.y_ticks) <= 7


def test_stages_keep_their_order_and_their_numbers_only():
    logged = [{"stage": "b", "step": 1, "loss": 1.0, "done": True, "note": "x"}, {"stage": "a", "step": 1, "loss": 2.0}]
    drawn = stages(logged, {})
    assert [(stage.name, [curve.name for curve in stage.losses]) for stage in drawn] == [
        ("b", ["loss"]),
        ("a", ["loss"]),
    ]


def test_bars_start_at_zero():
    drawn = bars({"teacher": {"matthews": 50.0}, "student": {"matthews": -5.0}})
    assert [(bar.side, bar.percent) for bar in drawn] == [("teacher", 50.0), ("student", 0.0)]
    assert bars({}) == []


def test_comparison_shows_every_run():
    rows = [SCORES, {**WITHOUT_TEACHER, "recipe": "a|b [red]"}, {}]
    console = Console(width=200, record=True)
    console.print(comparison(rows))
    terminal = console.export_text()
    for shown in ("84.04", "95.50 %", "12.1M/22.7M", "3.05/6.10", "1m35s"):
        assert shown in terminal
    assert "a|b [red]" in terminal
    assert "None" not in terminal


def test_a_comparison_on_one_task_fits_a_narrow_terminal():
    long = {
        "recipe": "hid-cls-contrast",
        "latency_ms": {"teacher": 53.94, "student": 26.29},
        "seconds": {"total": 3599},
    }
    console = Console(width=80, record=True)
    console.print(comparison([SCORES, {**SCORES, **long}]))
    assert "…" not in console.export_text()


def test_markdown_holds_any_cell():
    assert markdown(["who"], [["a|b"]]).splitlines() == ["| who |", "| --- |", r"| a\|b |"]


def test_quantities_read_well():
    assert [count(n) for n in (None, 12, 4_400, 22_700_000, 1_500_000_000)] == ["–", "12", "4.4k", "22.7M", "1.5B"]
    assert [duration(s) for s in (None, 0.4, 59.6, 3725)] == ["–", "0 s", "1 min 0 s", "1 h 2 min"]


@pytest.mark.parametrize(("scores", "tags"), [(SCORES, ["limbeck", "distillation"]), (WITHOUT_TEACHER, ["limbeck"])])
def test_the_cards_front_matter_and_recipe_are_yaml(scores, tags):
    card = model_card(RECIPE, scores, ["@article{a, title={A}}", "@article{b}"], base_model="org/teacher")
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == "transformers"
    assert front["base_model"] == "org/teacher"
    assert front["tags"] == tags
    fenced = re.search(r"```yaml\n(.*?)```", card, re.DOTALL)
    assert fenced is not None
    assert yaml.safe_load(fenced[1]) == RECIPE
    assert "@article{a, title={A}}\n\n@article{b}" in card
    assert "84.04" in card
    assert "chosen on the same split" in card
    assert "None" not in card


def test_the_card_without_a_hub_model_or_citations_leaves_them_out():
    card = model_card(RECIPE, {**SCORES, "split": "test"}, [])
    assert "base_model" not in card
    assert "bibtex" not in card
    assert "chosen on" not in card


def test_the_card_asks_a_model_of_pairs_with_two_texts():
    assert '"A sentence.", "Another one.", truncation' in model_card(RECIPE, SCORES, [], pairs=True)
    assert "Another one" not in model_card(RECIPE, SCORES, [])


def test_the_report_does_not_import_torch():
    modules = "limbeck.report.page, limbeck.report.card"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'limbeck.engine' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
