"""The commands a user types, from the teacher to the page about the student."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from limbeck import cli
from limbeck import recipe as book
from limbeck.spec import number
from tests import toy

COMMANDS = ("demo", "finetune", "distill", "check", "evaluate", "report", "recipes")
RUN_FOLDER = {
    "recipe.yaml",
    "request.json",
    "environment.json",
    "metrics.jsonl",
    "log.txt",
    "scores.json",
    "student",
    "report.html",
}


@pytest.fixture
def limbeck(monkeypatch, capsys):
    """The real command line, in this process, wide enough that tables are not cut: what it prints."""

    def run(*words):
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(cli, "out", type(cli.out)(highlight=False, soft_wrap=True, width=200))
        monkeypatch.setattr(sys, "argv", ["limbeck", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        assert not ended.value.code, said.err
        return said

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command, limbeck):
    said = limbeck(command, "--help").out
    assert f"limbeck {command}" in said
    assert "--debug" in said


def test_help_of_everything(limbeck):
    said = limbeck("--help").out
    assert all(command in said for command in COMMANDS)


@pytest.mark.parametrize("command", ["finetune", "distill"])
def test_help_names_what_a_run_takes(command, limbeck):
    said = limbeck(command, "--help").out
    data = "task data train eval test text text-pair label labels max-length few label-noise supplement"
    training = "out seed set epochs lr batch resume micro-batch save-every log-every track quiet"
    for option in f"{data} {training}".split():
        assert f"--{option} " in said


def test_recipes_are_listed(limbeck):
    said = limbeck("recipes").out
    assert all(name in said for name in book.shipped())
    listed = json.loads(limbeck("recipes", "--json").out)
    assert [one["name"] for one in listed] == book.shipped()
    assert all(one["about"] for one in listed)
    assert next(one for one in listed if one["name"] == "pkd")["variants"].keys() == {"last", "code"}


def test_the_papers_pairs_are_listed(limbeck):
    said = limbeck("recipes", "--pairs").out.splitlines()
    assert "RAIL-KD, 24/1024 → 6/768:" in said
    listed = json.loads(limbeck("recipes", "--pairs", "--json").out)
    assert all(command in said for pair in listed for command in pair["commands"])  # whole, to be copied


def test_a_recipe_is_shown(limbeck):
    said = limbeck("recipes", "pkd").out
    assert "Sun" in said
    assert "uniform(last=false)" in said
    assert "top(last=false)" in limbeck("recipes", "pkd:last").out
    for line in book.card("pkd").splitlines():
        assert not line.startswith("- ") or line.split()[-1].replace("`", "").strip("*.,") in said  # nothing is cut off
    shown = json.loads(limbeck("recipes", "pkd", "--json").out)
    assert shown["name"] == "pkd"
    assert shown["stages"][0]["objectives"]["layers"]["match"] == "cls"
    assert shown["card"] == book.card("pkd")


def asked(**changes):
    return toy.options(**{"teacher": toy.teacher("bert"), "layers": 2, **toy.data(70)} | changes)


def test_check_tells_what_a_run_would_do(limbeck, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = limbeck("check", "lwd", *asked(batch=16, epochs=2)).out
    for part in (
        "70 examples", "0 = farm, 1 = wild",
        "teacher: 4 layers, width 32, 4 heads", "student: 2 layers, width 32, 4 heads",
        "stage distil", "hidden", "1←1, 2←4", "32, 32", "linear(always=true)", "2,112 params",
        "reads of the student: hidden 1, 2; logits", "reads of the teacher: hidden 1, 4; logits (4 of 4 layers run)",
        "10 steps of 16 examples at lr 3e-05", "MiB", "keeps the best student",
    ):  # fmt: skip
        assert part in said, said
    assert list(tmp_path.iterdir()) == []


def test_check_as_json(limbeck, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = json.loads(limbeck("check", "rail-kd-l", "--json", *asked(layers=3)).out)
    assert shown["recipe"] == "rail-kd-l"
    assert shown["student"]["layers"] == 3
    assert shown["teacher"]["layers"] == 4
    (stage,) = shown["stages"]
    assert stage["steps"] == 40 * 3
    assert stage["unreached"] == []
    assert stage["frozen"] == 0
    assert stage["seconds"] > 0
    assert stage["memory_gib"] > 0
    assert sum(term["share"] for term in stage["terms"]) == pytest.approx(1)
    layers = next(term for term in stage["terms"] if term["name"] == "layers")
    assert layers["drawn"]
    assert [pair[0] for pair in layers["pairs"]] == [1, 2]
    assert layers["aligner_parameters"] == 2 * (32 * 128 + 128)
    assert layers["widths"] == [32, 32]
    weighed = {term["name"]: term["value"] * number(term["weight"]) for term in stage["terms"]}
    for term in stage["terms"]:
        assert term["share"] == pytest.approx(weighed[term["name"]] / sum(weighed.values()))
    assert list(tmp_path.iterdir()) == []


def test_check_names_what_is_frozen_and_what_nothing_reaches(limbeck):
    shown = json.loads(limbeck("check", "simkd", "--json", *asked()).out)
    (stage,) = shown["stages"]
    head = 32 * 32 + 32 + 2 * 32 + 2
    assert stage["frozen"] == head
    assert stage["trains"] == shown["student"]["parameters"] - head
    shown = json.loads(
        limbeck("check", "kd", "--json", *asked(set="stages.distil.objectives={h: {match: cls, map: last}}")).out
    )
    (stage,) = shown["stages"]
    assert sorted(stage["unreached"]) == [
        "student.bert.pooler.dense.bias", "student.bert.pooler.dense.weight", "student.classifier.bias",
        "student.classifier.weight",
    ]  # fmt: skip
    said = limbeck("check", "kd", *asked(set="stages.distil.objectives={h: {match: cls, map: first(last=false)}}")).out
    # a module all of whose parameters are meant is named instead of them
    assert "no objective reaches student.bert.encoder.layer.1, student.bert.pooler, student.classifier: frozen" in said
    assert "(1 of 4 layers run)" in said


def test_check_shows_the_values_for_the_task(limbeck, tmp_path):
    folder = tmp_path / "RTE"
    folder.mkdir()
    rows = [
        f"{i}\tthe hen beat the fox .\tthe fox {i}\t{name}"
        for i, name in enumerate(["entailment", "not_entailment"] * 4)
    ]
    for split in ("train", "dev"):
        (folder / f"{split}.tsv").write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *rows]), encoding="utf8")
    teacher = toy.teacher("bert", labels=("entailment", "not_entailment"))
    for spelled in ("rte", "RTE"):
        options = toy.options(teacher=teacher, layers=2, task=spelled, data=tmp_path)
        shown = json.loads(limbeck("check", "ild-rtc", "--json", *options).out)
        assert shown["stages"][0]["lr"] == 5e-5
        assert shown["task_values"] == book.task_values("ild-rtc", "rte") != {}


def test_check_shows_what_a_variant_changes(limbeck):
    path = "stages.distil.objectives.layers.map"
    assert f"  {path}: uniform(last=false) → top(last=false)\n" in limbeck("check", "pkd:last", *asked()).out
    shown = json.loads(limbeck("check", "pkd:last", "--json", *asked()).out)
    assert shown["variant_values"] == [[path, "uniform(last=false)", "top(last=false)"]]
    said = limbeck("check", "pkd", *asked()).out
    assert "differs from the plain recipe" not in said
    assert "is the plain recipe" not in said
    assert "is the plain recipe" not in limbeck("check", "pkd:last", *asked()).out
    said = " ".join(limbeck("check", "ild:four-layers", *asked()).out.split())
    assert "here the variant is the plain recipe: it has values of its own for sst2, qnli, mrpc" in said


def test_check_mixes_examples_half_and_half(limbeck):
    """Whatever the first step draws, so that the parts that compare mixtures show their size."""
    runs = (limbeck("check", "cr-ild", "--json", *asked(seed=seed)).out for seed in (2, 3, 4))
    for terms in (json.loads(run)["stages"][0]["terms"] for run in runs):
        values = {term["name"]: term["value"] for term in terms}
        assert values["hidden-consistency"] > 1e-5
        assert values["attention-consistency"] > 1e-6


def test_check_takes_the_data_options(limbeck):
    said = limbeck("check", "kd", *asked(few=10, label_noise=0.5)).out
    assert "10 of 70 examples taken, by the seed" in said
    assert "of 70 labels flipped" in said
    said = limbeck("check", "cr-ild", *asked(supplement=toy.data(40, 8)["train"])).out
    assert "stage layers: train: 40 examples" in said
    assert "40 steps of 32 examples" in said  # two batches, twenty times


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """finetune → distill → evaluate → report, each in a process of its own, on files."""
    place = tmp_path_factory.mktemp("chain")
    data = toy.options(**toy.data(96))
    raw = toy.save(toy.model("bert", headless=True), place / "raw")
    said = {}
    for name, words in {
        "finetune": ["finetune", "--model", raw, "--out", place / "teacher", "--epochs", 2, "--lr", "1e-3", *data],
        "distill": [
            "distill", "rail-kd-l", "--teacher", place / "teacher", "--layers", 2, "--out", place / "student",
            "--epochs", 2, "--lr", "1e-3", "--batch", 24, "--set", "stages.distil.lr=2e-3",
            "--set", "stages.distil.objectives.logits.logits.temperature=4", "--log-every", 4, "--seed", 7,
            "--track", "tensorboard", *data,
        ],
        "evaluate": [
            "evaluate", place / "teacher", place / "student", "--eval", toy.data(96)["eval"], "--json",
            "--predictions", place / "answers.jsonl",
        ],
        "report": ["report", place / "student", place / "teacher", "--out", place / "page.html"],
    }.items():  # fmt: skip
        said[name] = toy.command(*words)
        assert said[name].returncode == 0, said[name].stderr
    return place, said


@pytest.mark.slow
def test_what_is_said_is_kept(chain):
    """To the last line, notes from before there is a folder included."""
    place, said = chain
    lines = [line for line in said["distill"].stderr.splitlines() if not line.startswith("[transformers]")]
    assert (place / "student" / "log.txt").read_text("utf8").splitlines() == lines
    assert len(lines) > 5


@pytest.mark.slow
def test_run_folders(chain):
    place, _ = chain
    assert {path.name for path in (place / "teacher").iterdir()} == RUN_FOLDER
    tracked = {path.name for path in (place / "student").iterdir()} - RUN_FOLDER
    assert tracked == {"aligners.safetensors", "limbeck"}
    assert list((place / "student" / "limbeck").rglob("events.out.tfevents.*"))
    assert {path.name for path in (place / "student" / "student").iterdir()} >= {
        "config.json", "model.safetensors", "tokenizer.json", "README.md",
    }  # fmt: skip
    files = [path for path in (place / "student").rglob("*") if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1  # who may read one may read all
    environment = json.loads((place / "student" / "environment.json").read_text("utf8"))
    assert environment["command"].startswith("limbeck distill rail-kd-l")
    assert {"python", "limbeck", "torch", "transformers", "threads", "device"} <= environment.keys()


@pytest.mark.slow
def test_set_comes_after_the_shortcuts(chain):
    place, _ = chain
    recipe = yaml.safe_load((place / "student" / "recipe.yaml").read_text("utf8"))
    (stage,) = recipe["stages"]
    assert (stage["epochs"], stage["batch"], stage["lr"]) == (2, 24, 2e-3)
    assert stage["objectives"]["logits"]["logits"] == "kl(temperature=4)"
    assert book.validate(recipe) == book.resolve(str(place / "student" / "recipe.yaml"))
    assert json.loads((place / "student" / "request.json").read_text("utf8"))["seed"] == 7
    assert json.loads((place / "student" / "scores.json").read_text("utf8"))["seed"] == 7


@pytest.mark.slow
def test_what_is_logged(chain):
    place, _ = chain
    lines = toy.metrics(place / "student")
    assert [line["step"] for line in lines if "loss" in line] == [4, 8]
    assert [(line["step"], line["epoch"]) for line in lines if "eval" in line] == [(4, 0), (8, 1)]
    best = max(line["eval"]["accuracy"] for line in lines if "eval" in line)
    assert best == json.loads((place / "student" / "scores.json").read_text("utf8"))["student"]


@pytest.mark.slow
def test_progress_is_plain_lines(chain):
    _, said = chain
    for command in ("finetune", "distill"):
        text = said[command].stderr
        assert said[command].stdout == ""
        assert not any(mark in text for mark in ("\r", "\x1b", "━", "it/s", "Traceback"))
        assert "epoch 2  accuracy" in text
        assert "the student is in" in text
    assert "distil  step 4/8  loss" in said["distill"].stderr
    assert "of the teacher's" in said["distill"].stderr


@pytest.mark.slow
def test_evaluation_agrees_with_the_run(chain):
    place, said = chain
    teacher, student = json.loads(said["evaluate"].stdout)
    scores = json.loads((place / "student" / "scores.json").read_text("utf8"))
    assert (teacher["model"], student["model"]) == (str(place / "teacher"), str(place / "student"))
    assert teacher["scores"]["dev"] == scores["metrics"]["teacher"]
    assert student["scores"]["dev"] == scores["metrics"]["student"]
    assert [teacher["parameters"], student["parameters"]] == [scores["params"][who] for who in ("teacher", "student")]
    assert teacher["agreement"]["dev"] == 100
    assert teacher["speedup"] == 1
    assert student["speedup"] == teacher["latency_ms"] / student["latency_ms"]
    answers = [json.loads(line) for line in (place / "answers.jsonl").read_text("utf8").splitlines()]
    assert len(answers) == 2 * 32
    labels = [line.rpartition(",")[2] for line in Path(toy.data(96)["eval"]).read_text("utf8").splitlines()[1:]]
    for row in (teacher, student):
        own = [answer for answer in answers if answer["model"] == row["model"]]
        assert [answer["index"] for answer in own] == list(range(32))
        assert {answer["split"] for answer in own} == {"dev"}
        right = [answer["prediction"] == label for answer, label in zip(own, labels, strict=True)]
        assert 100 * sum(right) / 32 == pytest.approx(row["scores"]["dev"]["accuracy"])
        for answer in own:
            assert answer["prediction"] == ("farm", "wild")[answer["logits"][1] > answer["logits"][0]]
    same = [a["prediction"] == b["prediction"] for a, b in zip(answers[:32], answers[32:], strict=True)]
    assert student["agreement"]["dev"] == pytest.approx(100 * sum(same) / 32)


@pytest.mark.slow
def test_pages(chain):
    place, said = chain
    assert said["report"].stdout.strip() == str(place / "page.html")
    page = (place / "page.html").read_text("utf8")
    assert "rail-kd-l" in page
    assert "finetune" in page
    assert "<script" not in page
    assert "rail-kd-l" in (place / "student" / "report.html").read_text("utf8")


def test_evaluate_shows_a_table(limbeck):
    shown = limbeck(
        "evaluate", toy.teacher("bert"), toy.teacher("distilbert"), *toy.options(eval=toy.data()["eval"], max_length=8)
    )
    said, beside = shown.out, shown.err
    for part in ("guessed by name", "have 8 tokens: what is longer is cut there"):
        assert beside.count(part) == 1
    for part in ("accuracy", "matthews", "agreement", "speed-up", "1.00×", "100.0"):
        assert part in said


def test_finetune_some_layers(limbeck, tmp_path):
    words = ["finetune", "--model", toy.teacher("bert"), "--layers", 1, "--out", tmp_path / "run", "--epochs", 1]
    limbeck(*words, *toy.options(**toy.data()), "--quiet")
    config = json.loads((tmp_path / "run" / "student" / "config.json").read_text("utf8"))
    assert config["num_hidden_layers"] == 1
    assert {path.name for path in (tmp_path / "run").iterdir()} == RUN_FOLDER


def test_a_tenth_is_held_out_and_said(limbeck, tmp_path):
    said = limbeck("distill", "kd", *asked(eval=[], epochs=1, out=tmp_path / "run")).err
    assert "7 examples held out" in said


def test_allowed_code_runs(limbeck, tmp_path):
    """A stranger's distance by its dotted path, with leave."""
    change = "stages.distil.objectives.layers.distance=tests.cli.strange.halved"
    limbeck("distill", "pkd", *asked(out=tmp_path / "run", epochs=1, set=change), "--allow-code", "--quiet")
    assert "tests.cli.strange.halved" in (tmp_path / "run" / "recipe.yaml").read_text("utf8")


def test_allowing_code_ends_with_the_run(limbeck, tmp_path):
    from limbeck.spec import code_allowed

    changes = toy.options(set=["stages.*.steps=2", "stages.*.objectives.layers.distance=tests.cli.strange.halved"])
    limbeck("distill", "pkd", *asked(out=tmp_path / "run"), *changes, "--allow-code")
    assert not code_allowed.get()
