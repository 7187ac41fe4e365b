"""student/ is a plain folder: transformers loads it without limbeck, with its labels, and answers the same."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.torch import load_file, safe_open
from transformers import AutoConfig

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
import csv, json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "limbeck":
            raise ImportError("limbeck is not here")

sys.meta_path.insert(0, Blocked())
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

answers = {}
for folder in sys.argv[2:]:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with open(sys.argv[1], encoding="utf8", newline="") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    with torch.no_grad():
        logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    answers[folder] = {"logits": logits.tolist(), "labels": model.config.id2label}
assert "limbeck" not in sys.modules
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    asked = {"set": ("stages.*.lr=1e-3",)}
    return {
        "rail-kd-l": toy.distill("rail-kd-l", place / "rail", teacher=toy.teacher("bert"), **asked),
        "ild-rtc": toy.distill("ild-rtc", place / "ild", teacher=toy.teacher("bert"), **asked),
        "lwd": toy.distill("lwd", place / "lwd", teacher=toy.teacher("distilbert"), **asked),
        "mpnet": toy.distill("kd", place / "mpnet", teacher=toy.teacher("mpnet"), **asked),
    }


def test_a_stranger_gets_the_same_answers(runs):
    folders = [str(run.student) for run in runs.values()]
    environment = toy.environment(PYTHONPATH="")
    line = [sys.executable, "-c", STRANGER, toy.data()["eval"], *folders]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    corpus = load(DataSpec(eval=toy.data()["eval"]), train=False)
    for folder in folders:
        model, tokenizer = models.load_model(folder), models.load_tokenizer(folder)
        ours = predict(model, encode(corpus.evals["dev"], tokenizer, ("token_type_ids",), 64))
        np.testing.assert_allclose(answers[folder]["logits"], ours, atol=1e-5)
        assert answers[folder]["labels"] == {"0": "farm", "1": "wild"}


def test_the_scores_are_the_saved_students(runs):
    for run in runs.values():
        rows = compare([str(run.student)], DataSpec(eval=toy.data()["eval"]))
        assert rows[0]["scores"]["dev"] == run.scores["metrics"]["student"]


def test_aligners_lie_beside_and_never_inside(runs):
    for name, run in runs.items():
        made = models.load_model(str(run.student)).state_dict().keys()
        assert toy.weights(run.folder).keys() == made, name
    beside = {name: (run.folder / "aligners.safetensors") for name, run in runs.items()}
    assert [name for name, path in beside.items() if path.exists()] == ["rail-kd-l", "lwd"]
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
