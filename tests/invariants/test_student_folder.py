"""student/ is a plain folder: transformers loads it without limbeck, with its labels, and answers the same."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.torch import load_file, safe_open
from transformers import AutoConfig, BertForSequenceClassification

import limbeck
from limbeck import models
from limbeck.compare import compare
from limbeck.data.encoding import encode
from limbeck.data.loading import load
from limbeck.data.spec import DataSpec
from limbeck.evaluation import predict
from tests import toy

# What somebody who has never heard of limbeck does with the folder.
STRANGER = """
import csv, json, os, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "limbeck":
            raise ImportError("limbeck is not here")

sys.meta_path.insert(0, Blocked())
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

answers = {}
for folder in sys.argv[2:]:
    own_code = os.path.exists(os.path.join(folder, "wide_head.py"))
    try:
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        assert not own_code
    except ValueError as error:
        assert "trust_remote_code" in str(error), error
        model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=own_code)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with open(sys.argv[1], encoding="utf8", newline="") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    with torch.no_grad():
        logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    answers[folder] = {"logits": logits.tolist(), "labels": model.config.id2label}
assert "limbeck" not in sys.modules
print()
print(json.dumps(answers))
"""


def narrow(family):
    return toy.teacher(family, width=16, layers=2, seed=1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    asked = {"set": ("stages.*.lr=1e-3",)}
    return {
        "rail-kd-l": toy.distill("rail-kd-l", place / "rail", teacher=toy.teacher("bert"), **asked),
        "ild-rtc": toy.distill("ild-rtc", place / "ild", teacher=toy.teacher("bert"), **asked),
        "lwd": toy.distill("lwd", place / "lwd", teacher=toy.teacher("distilbert"), **asked),
        "mpnet": toy.distill("kd", place / "mpnet", teacher=toy.teacher("mpnet"), **asked),
        "narrow": toy.distill(
            "ild-rtc", place / "narrow", teacher=toy.teacher("bert"), student=narrow("bert"), **asked
        ),
        "narrow-distilbert": toy.distill(
            "simkd", place / "distilbert", teacher=toy.teacher("distilbert"), student=narrow("distilbert"), **asked
        ),
        "narrow-deberta": toy.distill(
            "simkd", place / "deberta", teacher=toy.teacher("deberta-v2"), student=narrow("deberta-v2"), **asked
        ),
        "folded": toy.distill(
            "ild-rtc",
            place / "folded",
            teacher=toy.teacher("bert"),
            set=("stages.*.lr=1e-3", 'init=[layers(first), "classifier(frozen=true, project=true)"]'),
        ),
    }


def test_a_stranger_gets_the_same_answers(runs, tmp_path):
    folders = [str(run.student) for run in runs.values()]
    environment = toy.environment(PYTHONPATH="", HF_MODULES_CACHE=str(tmp_path))
    line = [sys.executable, "-c", STRANGER, toy.data()["eval"], *folders]
    done = subprocess.run(
        line, env=environment, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    corpus = load(DataSpec(eval=toy.data()["eval"]), train=False)
    for folder in folders:
        model, tokenizer = models.load_model(folder), models.load_tokenizer(folder)
        ours = predict(model, encode(corpus.evals["dev"], tokenizer, ("token_type_ids",), 64))
        np.testing.assert_allclose(answers[folder]["logits"], ours, atol=1e-5)
        assert answers[folder]["labels"] == {"0": "farm", "1": "wild"}


def test_only_a_narrower_student_of_a_reused_classifier_brings_code(runs):
    """The family's own class would load it too, with a head of its own making, if the shapes did not forbid it."""
    with_code = {name for name, run in runs.items() if (run.student / "wide_head.py").exists()}
    assert with_code == {"narrow", "narrow-distilbert", "narrow-deberta"}
    for name, run in runs.items():
        config = json.loads((run.student / "config.json").read_text())
        assert config["model_type"].startswith("limbeck-") == ("auto_map" in config) == (name in with_code)
        asks = "trust_remote_code=True" in (run.student / "README.md").read_text("utf8")
        assert asks == (name in with_code)
    with pytest.raises(RuntimeError, match="mismatched_sizes"), models.quiet():
        BertForSequenceClassification.from_pretrained(runs["narrow"].student)
    folded = models.config_of(str(runs["folded"].student))
    assert folded.model_type == "bert"


def test_a_narrower_student_needs_nothing_said(runs, tmp_path):
    """Evaluated, timed, distilled further and checked as any other."""
    folder = str(runs["narrow"].folder)
    said = toy.command("evaluate", folder, "--eval", toy.data()["eval"], "--json")
    assert said.returncode == 0, said.stderr
    row = json.loads(said.stdout)[0]
    assert row["scores"]["dev"] == runs["narrow"].scores["metrics"]["student"]
    assert row["latency_ms"] > 0
    assert row["parameters"] == runs["narrow"].scores["params"]["student"]
    for recipe in ("kd", "ild-rtc", "simkd"):
        again = toy.distill(recipe, tmp_path / recipe, teacher=folder, layers=2)
        assert again.scores["teacher"] == runs["narrow"].scores["student"]
        assert models.config_of(str(again.student)).head_size == 32


def test_the_scores_are_the_saved_students(runs):
    for run in runs.values():
        rows = compare([str(run.student)], DataSpec(eval=toy.data()["eval"]))
        assert rows[0]["scores"]["dev"] == run.scores["metrics"]["student"]


def test_aligners_lie_beside_and_never_inside(runs):
    for name, run in runs.items():
        made = models.load_model(str(run.student)).state_dict().keys()
        assert toy.weights(run.folder).keys() == made, name
    beside = {name: (run.folder / "aligners.safetensors") for name, run in runs.items()}
    assert [name for name, path in beside.items() if path.exists()] == ["rail-kd-l", "lwd", "narrow"]
    assert load_file(beside["lwd"])["layers.aligner.maps.0.weight"].shape == (32, 32)
    assert load_file(beside["rail-kd-l"])["layers.aligner.student.0.weight"].shape == (128, 32)


def test_nothing_pickled(runs):
    for run in runs.values():
        files = [path for path in run.folder.rglob("*") if path.is_file()]
        assert not [path for path in files if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt")]
        with safe_open(run.student / "model.safetensors", "pt") as file:
            assert all(file.get_tensor(key).dtype.is_floating_point for key in file.keys())  # noqa: SIM118


def test_label_order_is_the_teachers(tmp_path):
    """Classes are named, not numbered: a teacher with the other order makes the same student with rows swapped."""
    turned = models.load_model(toy.teacher("bert"))
    toy_model = toy.model("bert", labels=("wild", "farm"))
    weights = turned.state_dict()
    for name in ("classifier.weight", "classifier.bias"):
        weights[name] = weights[name].flip(0)
    toy_model.load_state_dict(weights)
    other = toy.save(toy_model, tmp_path / "turned")
    odd = toy.data(64, 31)  # so that no accuracy is its own opposite
    straight = toy.distill("ild-rtc", tmp_path / "straight", teacher=toy.teacher("bert"), steps=6, **odd)
    crossed = toy.distill("ild-rtc", tmp_path / "crossed", teacher=other, steps=6, **odd)
    assert AutoConfig.from_pretrained(straight.student).id2label == {0: "farm", 1: "wild"}
    assert AutoConfig.from_pretrained(crossed.student).id2label == {0: "wild", 1: "farm"}
    assert crossed.scores["teacher"] == straight.scores["teacher"]
    assert crossed.scores["student"] == pytest.approx(straight.scores["student"])
    for ours, theirs in zip(toy.losses(crossed.folder), toy.losses(straight.folder), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_labels_without_names_go_by_index(tmp_path, capsys):
    unnamed = toy.save(toy.model("bert", labels=2), tmp_path / "unnamed")
    run = limbeck.distill("kd", teacher=unnamed, layers=2, out=tmp_path / "run", set=["stages.*.steps=2"], **toy.data())
    assert "mapped by index, 0 = farm, 1 = wild" in capsys.readouterr().err
    assert AutoConfig.from_pretrained(run.student).id2label == {0: "farm", 1: "wild"}
    named = toy.distill("kd", tmp_path / "named", teacher=toy.teacher("bert"), steps=2)
    assert run.scores["teacher"] == named.scores["teacher"]


def test_a_run_folder_is_a_teacher(runs, tmp_path):
    again = toy.distill("kd", tmp_path / "again", teacher=str(runs["rail-kd-l"].folder), layers=1)
    assert again.scores["teacher"] == runs["rail-kd-l"].scores["student"]
