"""Resumed = uninterrupted, bit by bit on the CPU, with dropout on, whatever the moment a run was killed at."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import limbeck
from limbeck import LimbeckError
from limbeck import run as run_module
from limbeck.data.spec import DataSpec
from limbeck.engine import checkpoints as checkpoints_module
from limbeck.engine.checkpoints import Checkpoints
from limbeck.engine.loop import Loop
from limbeck.folder import RunFolder
from limbeck.prepare import prepare
from limbeck.projector import folded
from limbeck.request import request
from tests import toy

# Two stages; an aligner that lives across them, and one that belongs to the second.
RECIPE = """
name: two-stages
init: [layers(first)]
aligners: {bridge: linear(always=true)}
stages:
  - name: states
    epochs: 4
    batch: 16
    lr: 1e-3
    objectives:
      states: {match: hidden, map: uniform, align: bridge, distance: mse}
  - name: predictions
    epochs: 5
    batch: 16
    lr: 1e-3
    patience: 4
    objectives:
      logits: {logits: kl(temperature=2)}
      labels: {labels: cross_entropy, weight: ramp(0.5)}
      states: {match: hidden, map: uniform, align: bridge, distance: mse}
      starts: {match: cls, map: uniform, align: bridge, distance: mse}
      means: {match: mean, map: random(last=false), align: both(width=16), distance: unit_sq}
"""
EPOCH = 3  # steps
EXAMPLES = 40  # so the last step of an epoch has a short batch


class Killed(BaseException):
    """Nothing may catch this, as nothing catches SIGKILL."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "two-stages.yaml"
    path.write_text(RECIPE, encoding="utf8")
    return path


def start(recipe, out, **changes):
    asked = {
        "pace": limbeck.Pace(log_every=1, save_every=0),
        "teacher": toy.teacher("bert", dropout=0.1),
        "steps": None,
        **toy.data(EXAMPLES, 16),
    }
    return toy.distill(str(recipe), out, **asked | changes)


@pytest.fixture(scope="module")
def uninterrupted(recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    start(recipe, out)
    return out


def assert_same(run, reference):
    assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in reference.iterdir())
    assert (run / "metrics.jsonl").read_text("utf8") == (reference / "metrics.jsonl").read_text("utf8")
    for name in ("student/model.safetensors", "aligners.safetensors"):
        ours, theirs = load_file(run / name), load_file(reference / name)
        assert ours.keys() == theirs.keys()
        assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    assert scores(run) == scores(reference)
    for name in ("recipe.yaml", "request.json", "student/config.json", "student/tokenizer.json"):
        assert (run / name).read_bytes() == (reference / name).read_bytes(), name


def scores(run):
    """Scores, apart from what a clock said."""
    read = json.loads((run / "scores.json").read_text("utf8"))
    return {name: value for name, value in read.items() if name not in ("seconds", "latency_ms")}


class Fuse:
    """Kills a run the first time each moment is reached; a moment is a stage, a place, and whether an epoch ends."""

    def __init__(self, patch):
        self.met: list[tuple] = []
        self.stage, self.ends, self.armed = "before", False, True
        for owner, name in (
            (Loop, "run"),
            (Loop, "_step"),
            (Loop, "_judge"),
            (RunFolder, "log"),
            (Checkpoints, "save"),
            (Checkpoints, "save_best"),
            (Checkpoints, "load_best"),
            (Checkpoints, "clear"),
            (checkpoints_module, "write_folder"),
            (run_module, "write_folder"),
            (run_module, "write_file"),
            (run_module, "write_json"),
            (run_module, "write_text"),
            (run_module, "write_report"),
        ):
            patch.setattr(owner, name, self.watched(name, getattr(owner, name)))
        patch.setattr(shutil, "rmtree", self.half_removed(shutil.rmtree))

    def watched(self, name, function):
        def watching(*args, **options):
            self.follow(name, args)
            self.burn(f"before {name}")
            answer = function(*args, **options)
            if name == "_step":
                self.ends = args[4].step % EPOCH == 0
            self.burn(f"after {name}")
            return answer

        return watching

    def half_removed(self, function):
        def removing(path, **options):
            files = sorted(file for file in Path(path).rglob("*") if file.is_file())
            if files and self.is_new("amid rmtree"):
                files[0].unlink()
                self.burn("amid rmtree")
            function(path, **options)

        return removing

    def follow(self, name, args):
        if name == "run":
            self.stage, self.ends = args[2].name, args[3].step > 0 and args[3].step % EPOCH == 0
        elif name == "clear":
            self.stage = "after"

    def is_new(self, place):
        return self.armed and (self.stage, place, self.ends) not in self.met

    def burn(self, place):
        if self.is_new(place):
            self.met.append((self.stage, place, self.ends))
            raise Killed(self.met[-1])


@pytest.mark.slow
def test_killed_at_every_moment(recipe, uninterrupted, tmp_path, monkeypatch):
    fuse = Fuse(monkeypatch)
    out = tmp_path / "run"
    while True:
        try:
            start(recipe, out, resume=True)
            break
        except Killed:
            assert len(fuse.met) < 300
    met = set(fuse.met)
    assert_same(out, uninterrupted)
    for stage in ("states", "predictions"):
        for ends in (False, True):
            assert {(stage, place, ends) for place in ("after _step", "before save", "after save")} <= met
        assert {(stage, "before _judge", True), (stage, "after _judge", True), (stage, "amid rmtree", True)} <= met
        assert (stage, "after run", True) in met
    assert {("predictions", f"{when} save_best", True) for when in ("before", "after")} <= met
    assert {("after", "before clear", True), ("after", "amid rmtree", True)} <= met


PROJECTED = """
name: projected
init: [layers(first), classifier(frozen=true)]
stages:
  - name: predictions
    epochs: 2
    batch: 16
    lr: 1e-3
    objectives:
      logits: {logits: kl(temperature=2)}
      reads: {match: classifier_input, distance: mse}
      states: {match: hidden, map: uniform, align: linear, distance: mse}
"""


def test_a_projector_resumes_with_its_student(tmp_path, monkeypatch):
    recipe = tmp_path / "projected.yaml"
    recipe.write_text(PROJECTED, encoding="utf8")
    asked = {"student": toy.teacher("bert", width=16, layers=2, seed=1)}
    start(recipe, tmp_path / "whole", **asked)
    fuse = Fuse(monkeypatch)
    fuse.is_new = lambda at: fuse.armed and at in ("after _step", "after _judge", "before write_json")
    for _ in range(6):  # the third step is an epoch's last; then the scores are written
        with pytest.raises(Killed):
            start(recipe, tmp_path / "run", resume=True, **asked)
    fuse.armed = False
    start(recipe, tmp_path / "run", resume=True, **asked)
    assert_same(tmp_path / "run", tmp_path / "whole")
    began = prepare(request(str(recipe), DataSpec(**toy.data(EXAMPLES, 16)), teacher=toy.teacher("bert"), **asked))
    before, after = folded(began.student), toy.weights(tmp_path / "run")
    assert not torch.equal(before.bert.pooler.dense.weight, after["bert.pooler.dense.weight"])  # it trained
    assert torch.equal(before.classifier.weight, after["classifier.weight"])  # it was frozen


@pytest.mark.parametrize(
    ("stage", "place", "save_every"),
    [("states", "after log", 60.0), ("predictions", "after _step", 60.0), ("predictions", "after write_json", 60.0)],
)
def test_killed_between_checkpoints(recipe, uninterrupted, tmp_path, monkeypatch, stage, place, save_every):
    """With no checkpoint but those a stage ends with: what was logged since is logged again, not twice."""
    fuse = Fuse(monkeypatch)
    fuse.is_new = lambda at: fuse.armed and (fuse.stage, at) == (stage, place)
    pace = limbeck.Pace(log_every=1, save_every=save_every)
    with pytest.raises(Killed):
        start(recipe, tmp_path / "run", pace=pace)
    fuse.armed = False
    start(recipe, tmp_path / "run", pace=pace, resume=True)
    assert_same(tmp_path / "run", uninterrupted)


def test_dropout_is_on_and_named_aligners_train_on(recipe, uninterrupted, tmp_path, monkeypatch):
    """The equality above would be cheap without them."""
    start(recipe, tmp_path / "dry", teacher=toy.teacher("bert", dropout=0.0))
    assert toy.losses(tmp_path / "dry")[0]["loss"] != toy.losses(uninterrupted)[0]["loss"]
    fuse = Fuse(monkeypatch)
    fuse.is_new = lambda at: (fuse.stage, at) == ("predictions", "before run")
    with pytest.raises(Killed):
        start(recipe, tmp_path / "run")
    between = load_file(tmp_path / "run" / "checkpoints" / "001-00000000" / "weights.safetensors")
    after = load_file(uninterrupted / "aligners.safetensors")
    drawn = prepared(recipe).aligners["bridge"].module.state_dict()
    for name, weight in drawn.items():
        assert not torch.allclose(between[f"aligners.bridge.{name}"], weight, atol=1e-4)
        assert not torch.allclose(after[f"states.aligner.{name}"], between[f"aligners.bridge.{name}"], atol=1e-4)
        assert torch.equal(after[f"states.aligner.{name}"], after[f"starts.aligner.{name}"])


def prepared(recipe):
    data = DataSpec(**toy.data(EXAMPLES, 16))
    return prepare(request(str(recipe), data, teacher=toy.teacher("bert", dropout=0.1), layers=2))


@pytest.mark.parametrize(
    ("train", "moving"),
    [("[student, aligners]", {"bridge", "means"}), ("[student, bridge]", {"bridge"}), ("[student]", set())],
)
def test_what_trains(recipe, train, moving):
    asked = request(
        str(recipe), DataSpec(**toy.data(EXAMPLES, 16)), set=[f"stages.*.train={train}"],
        teacher=toy.teacher("bert"), layers=2,
    )  # fmt: skip
    ready = prepare(asked)
    ready.set_trained(1)
    terms = ready.distillers[1].terms
    found = {"bridge": terms["states"], "means": terms["means"]}
    assert {name for name, term in found.items() if all(p.requires_grad for p in term.parameters())} == moving
    assert {name for name, term in found.items() if any(p.requires_grad for p in term.parameters())} == moving


def test_a_side_that_an_aligner_has_not(recipe):
    asked = request(
        str(recipe), DataSpec(**toy.data(EXAMPLES, 16)), set=["stages.*.train=[student, bridge.student]"],
        teacher=toy.teacher("bert"), layers=2,
    )  # fmt: skip
    with pytest.raises(LimbeckError, match=r"bridge\.student.*has no sides\. Say bridge alone"):
        prepare(asked).set_trained(1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_going_on_elsewhere_is_said_each_time(precision, recipe, tmp_path, monkeypatch):
    fuse = Fuse(monkeypatch)
    moments = ["before run", "before load_best"]
    fuse.is_new = lambda at: fuse.armed and (fuse.stage, [at]) == ("predictions", moments[:1])
    with pytest.raises(Killed):
        start(recipe, tmp_path / "run")
    for again in range(2):
        moments.pop(0)
        with nullcontext() if again else pytest.raises(Killed):
            start(recipe, tmp_path / "run", resume=True, pace=limbeck.Pace(precision=precision))
    said = (tmp_path / "run" / "log.txt").read_text("utf8")
    assert said.count("goes on elsewhere than it began") == (2 if precision == "bf16" else 0)
    assert said.count("precision was fp32, is bf16") == (2 if precision == "bf16" else 0)


def test_a_run_without_a_checkpoint_begins_where_it_is_begun_again(recipe, tmp_path, monkeypatch):
    fuse = Fuse(monkeypatch)
    fuse.is_new = lambda at: fuse.armed and at == "before run"
    with pytest.raises(Killed):
        start(recipe, tmp_path / "run")
    fuse.armed = False
    start(recipe, tmp_path / "run", resume=True, pace=limbeck.Pace(precision="bf16"))
    assert json.loads((tmp_path / "run" / "environment.json").read_text("utf8"))["precision"] == "bf16"
    assert "elsewhere" not in (tmp_path / "run" / "log.txt").read_text("utf8")


@pytest.mark.slow
def test_sigkill(recipe, uninterrupted, tmp_path):
    out = tmp_path / "run"
    asked = toy.options(
        teacher=toy.teacher("bert", dropout=0.1), layers=2, out=out, log_every=1, save_every=0, resume=True
    )
    line = [sys.executable, "-m", "limbeck", "distill", str(recipe), *asked, *toy.options(**toy.data(EXAMPLES, 16))]
    draw = random.Random(7)
    for lines in (draw.randint(1, 5), draw.randint(8, 16)):
        process = subprocess.Popen(line, env=toy.environment(), stderr=subprocess.PIPE, text=True)
        wait_for_lines(out / "metrics.jsonl", lines, process)
        time.sleep(draw.random() / 50)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (out / "scores.json").exists()
    said = len((out / "log.txt").read_text("utf8"))
    start(recipe, out, resume=True)
    assert "goes on at stage" in (out / "log.txt").read_text("utf8")[said:]
    assert_same(out, uninterrupted)


def wait_for_lines(path, count, process):
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_nothing_there_starts(recipe, uninterrupted, tmp_path):
    (tmp_path / "run").mkdir()
    start(recipe, tmp_path / "run", resume=True)
    assert_same(tmp_path / "run", uninterrupted)


def test_finished_says_so_and_changes_nothing(recipe, uninterrupted, capsys):
    def contents():
        return {
            path: (path.stat().st_mtime_ns, path.read_bytes()) for path in uninterrupted.rglob("*") if path.is_file()
        }

    before = contents()
    again = limbeck.distill(
        str(recipe), teacher=toy.teacher("bert", dropout=0.1), layers=2, out=uninterrupted, resume=True,
        **toy.data(EXAMPLES, 16),
    )  # fmt: skip
    assert "is finished" in capsys.readouterr().err
    assert contents() == before
    assert again.scores["student"] == scores(uninterrupted)["student"]


OTHERWISE = {
    "seed": ({"seed": 43}, "seed: was 42, now 43"),
    "recipe": ({"set": ("stages.states.lr=5e-4",)}, "recipe.stages.states.lr: was 0.001, now 0.0005"),
    "depth": ({"layers": 3}, "layers: was 2, now 3"),
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_asked_for_otherwise(recipe, uninterrupted, what):
    changes, said = OTHERWISE[what]
    with pytest.raises(LimbeckError, match="asked for otherwise") as found:
        start(recipe, uninterrupted, resume=True, **changes)
    assert said in str(found.value)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_other_data_under_the_same_name(recipe, tmp_path, split):
    files = {name: shutil.copy(path, tmp_path / f"{name}.csv") for name, path in toy.data(EXAMPLES, 16).items()}
    start(recipe, tmp_path / "run", **files)
    header, first, *rest = files[split].read_text("utf8").splitlines()
    files[split].write_text("\n".join([header, *rest, first]) + "\n", encoding="utf8")
    with pytest.raises(LimbeckError, match="fingerprint"):
        start(recipe, tmp_path / "run", resume=True, **files)
