"""Every shipped recipe trains on every family and resumes exactly; one added later is tested without a line here."""

import json
import math
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import limbeck
from limbeck import architectures, models
from limbeck import recipe as book
from limbeck.errors import LimbeckError
from limbeck.folder import RunFolder
from limbeck.taps import Tap
from tests import toy
from tests.tiny import every_family

# Of the decoders that are laid out as Llama, one; the others differ inside of their blocks.
FAMILIES = tuple(name for name in every_family if architectures.FAMILIES[name] is not architectures.LLAMA)
FAMILIES += ("llama",)
RECIPES = [
    name for base in book.shipped() for name in (base, *(f"{base}:{v}" for v in book.read(base).get("variants", {})))
]

# The papers' families; a variant differs from its recipe in other ways than a family does.
PAIRS = [
    (name, family)
    for name in RECIPES
    for family in ("bert", "roberta", "distilbert", "electra", "mpnet", "deberta-v2")
    if family == "bert" or ":" not in name
]

FEW, SMALL = toy.data(16, 16), ("stages.*.batch=8",)

SCORES = {
    "task", "metric", "teacher", "student", "retention", "single_answer", "lower", "metrics", "splits", "split",
    "selected_on", "params", "latency_ms", "ood", "seed", "recipe", "seconds",
}  # fmt: skip


def train(recipe, out, family="bert", *, labels=toy.LABELS, **asked):
    """Three steps a stage, of which the third begins an epoch; `finetune` has no teacher."""
    model, asked = toy.teacher(family, labels=labels), {**FEW, **asked}
    if recipe != "finetune":
        return toy.distill(recipe, out, teacher=model, set=SMALL, **asked)
    asked.setdefault("pace", limbeck.Pace(log_every=1))
    return limbeck.finetune(model, out=out, layers=2, set=["stages.*.steps=3", *SMALL], quiet=True, **asked)


@cache
def whole(recipe, family):
    """A run that nothing disturbs."""
    return train(recipe, toy.workplace() / f"whole-{recipe.replace(':', '-')}-{family}", family)


def assert_left(run, recipe):
    """Every part of the loss is there and finite, and the run folder is whole; the student cites its method."""
    parts = {
        stage.name: {name for name, declared in stage.objectives.items() if declared.get("weight") != 0}
        for stage in book.resolve(recipe).stages
    }
    lines = toy.losses(run.folder)
    assert [(line["stage"], line["step"]) for line in lines] == [(stage, k) for stage in parts for k in (1, 2, 3)]
    for line in lines:
        assert set(line) == {"stage", "epoch", "step", "loss", "lr", *parts[line["stage"]]}
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
        assert all(line[name] >= 0 for name in parts[line["stage"]])
    scores = json.loads((run.folder / "scores.json").read_text("utf8"))
    assert set(scores) == SCORES
    assert scores == run.scores
    assert scores["recipe"] == recipe
    assert 0 <= scores["student"] <= 100 or scores["metric"] == "spearman"
    assert (run.student / "config.json").is_file()
    assert (run.student / "model.safetensors").is_file()
    cited = re.findall(r"^@\w+\{(\S+),$", book.card(recipe.partition(":")[0]), re.MULTILINE)
    assert cited
    assert all(f"{{{name}," in (run.student / "README.md").read_text("utf8") for name in cited)
    return scores


@pytest.mark.parametrize(
    ("recipe", "family"),
    [(name, family) for name in RECIPES for family in FAMILIES if family == "bert" or ":" not in name],
)
def test_trains_on_every_family(recipe, family, tmp_path):
    if family == "modernbert" and recipe == "theseus":
        with pytest.raises(LimbeckError, match=r"layers of modernbert are of several types \(full.*sliding"):
            train(recipe, tmp_path / "run", family)
        return
    run = whole(recipe, family)
    scores = assert_left(run, recipe)
    assert scores["metric"] == "accuracy"
    assert scores["split"] == scores["selected_on"] == "dev"
    said, floor = (run.folder / "log.txt").read_text("utf8"), scores["single_answer"]
    weak = scores["teacher"] is not None and scores["teacher"] <= floor
    assert ("does not know this task" in said) == weak
    assert ("learnt nothing" in said) == (scores["student"] <= floor and not weak)
    has_teacher = recipe != "finetune"
    assert set(scores["params"]) == set(scores["metrics"]) == {"teacher", "student"}
    assert (scores["params"]["teacher"] is not None) == bool(scores["metrics"]["teacher"]) == has_teacher
    assert (scores["teacher"] is not None) == has_teacher
    if has_teacher:
        assert scores["retention"] == pytest.approx(100 * scores["student"] / scores["teacher"])
        shared = architectures.FAMILIES[family].shared  # a block used less often is no smaller
        assert (scores["params"]["student"] < scores["params"]["teacher"]) != shared


@pytest.mark.parametrize("recipe", RECIPES)
def test_trains_on_a_score(recipe, tmp_path):
    scores = assert_left(train(recipe, tmp_path / "run", labels=1, **toy.scores(16, 16)), recipe)
    assert scores["metric"] == "spearman"
    assert scores["single_answer"] is None
    assert set(scores["metrics"]["student"]) == {"spearman", "pearson"}
    assert models.config_of(str(tmp_path / "run")).num_labels == 1


@pytest.mark.parametrize("recipe", book.shipped())
def test_learns_in_half_precision(recipe, tmp_path):
    """As on a GPU: every part of the loss is what it is in fp32, but for rounding."""
    teacher = toy.teacher("bert", dropout=0.0)
    found = {}
    for precision in ("fp32", "bf16"):
        pace, out = limbeck.Pace(log_every=1, precision=precision), tmp_path / precision
        if recipe == "finetune":
            limbeck.finetune(teacher, out=out, layers=2, set=["stages.*.steps=2"], quiet=True, pace=pace, **toy.data())
        else:
            toy.distill(recipe, out, teacher=teacher, steps=2, pace=pace)
        found[precision] = [line for line in toy.losses(out) if line["step"] == 1]
    numbers = (line for lines in zip(*found.values()) for line in zip(*(one.items() for one in lines)))
    for (name, exact), (_, rounded) in numbers:
        assert exact == rounded if isinstance(exact, str) else rounded == pytest.approx(exact, rel=0.05, abs=0.02), name
    changed = [toy.weights(tmp_path / precision) for precision in found]
    assert any(not torch.equal(a, b) for a, b in zip(*(weights.values() for weights in changed)))


class Killed(BaseException):
    """Nothing may catch this, as nothing catches SIGKILL."""


@pytest.mark.parametrize(("recipe", "family"), PAIRS)
def test_a_run_killed_in_every_stage_ends_as_if_nothing_had_happened(recipe, family, tmp_path, monkeypatch):
    pace = limbeck.Pace(log_every=1, save_every=0)
    killed, log = [], RunFolder.log

    def kill(folder, record):
        log(folder, record)
        if record["step"] == 2 and record["stage"] not in killed:
            killed.append(record["stage"])
            raise Killed

    monkeypatch.setattr(RunFolder, "log", kill)
    stages = [stage.name for stage in book.resolve(recipe).stages]
    for _ in stages:
        with pytest.raises(Killed):
            train(recipe, tmp_path / "run", family, pace=pace, resume=True)
    run = train(recipe, tmp_path / "run", family, pace=pace, resume=True)
    assert killed == stages
    expected = whole(recipe, family)
    assert toy.metrics(run.folder) == toy.metrics(expected.folder)
    beside, theirs = (
        {path.name: load_file(path) for path in one.folder.glob("*.safetensors")} for one in (run, expected)
    )
    assert {name: list(held) for name, held in beside.items()} == {name: list(held) for name, held in theirs.items()}
    assert all(torch.equal(held[key], theirs[name][key]) for name, held in beside.items() for key in held)
    found, expected = toy.weights(run.folder), toy.weights(expected.folder)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


ONE_WIDTH = {"theseus"}  # its student's layers stand among the teacher's


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name.split(":")[0] not in ONE_WIDTH | {"finetune"}])
def test_a_narrower_student_with_other_heads(recipe, tmp_path):
    narrow = toy.teacher("bert", width=16, heads=2, layers=2, seed=1)
    run = toy.distill(recipe, tmp_path / "run", teacher=toy.teacher("bert"), student=narrow, set=SMALL, **FEW)
    assert_left(run, recipe)
    assert models.config_of(str(run.student)).hidden_size == 16
    if any("align" in declared for declared in book.resolve(recipe).stages[-1].objectives.values()):
        assert (run.folder / "aligners.safetensors").exists()


def test_what_only_training_needs_is_not_left():
    assert not (whole("prokt", "bert").folder / "aligners.safetensors").exists()  # a whole teacher
    left = load_file(whole("codir", "bert").folder / "aligners.safetensors")  # memory banks
    assert {name.rpartition(".")[0] for name in left} == {"contrast.maps.student", "contrast.maps.teacher"}


def test_what_an_earlier_stage_trained_beside_the_student_is_left_too():
    folder = whole("universal-kd", "bert").folder
    assert {path.name for path in folder.glob("*.safetensors")} == {
        f"aligners-{s}.safetensors" for s in ("classifiers", "layers")
    }
    learnt = load_file(folder / "aligners-layers.safetensors")
    assert any(".student." in name for name in learnt)
    assert any(".teacher." in name for name in learnt)
    weights = load_file(whole("emd-ild", "bert").folder / "aligners-layers.safetensors")
    assert {"layers.sends", "layers.takes"} <= set(weights)  # how much each layer counted


@pytest.mark.parametrize("kind", ["mlp", "next-layer", "all-next-layers"])
@pytest.mark.parametrize("narrow", [False, True])
def test_filters_of_every_kind(kind, narrow, tmp_path):
    who = {"student": toy.teacher("bert", width=16, layers=2, seed=1)} if narrow else {"layers": 2}
    filters = f"aligners.task=filters({kind})"
    run = toy.distill("ted", tmp_path / "run", teacher=toy.teacher("bert"), set=(filters,), **who)
    assert_left(run, "ted")
    assert any(".teacher.filters." in name for name in load_file(run.folder / "aligners.safetensors"))


def test_a_student_of_another_family(tmp_path, monkeypatch):
    """A teacher that reads token types gets them, although the student and its tokenizer know nothing of them."""
    given = []
    real = Tap.__call__

    def watch(self, **batch):
        given.append((self.model.config.model_type, self.columns, sorted(batch)))
        return real(self, **batch)

    monkeypatch.setattr(Tap, "__call__", watch)
    student = toy.teacher("distilbert", layers=2, seed=1)
    pairs = toy.write_csv(
        tmp_path / "pairs.csv",
        ("text", "text_pair", "label"),
        [
            (f"the {a} beat the {b} .", f"the {b} passed the {a} .", label)
            for label, a, b in [("farm", "hen", "fox"), ("wild", "wolf", "goat")] * 8
        ],
    )
    run = toy.distill(
        "rail-kd-l", tmp_path / "run", teacher=toy.teacher("bert"), student=student, train=pairs, eval=pairs
    )
    assert_left(run, "rail-kd-l")
    assert models.config_of(str(run.student)).model_type == "distilbert"
    assert {kind for kind, *_ in given} == {"bert", "distilbert"}
    for kind, columns, columns_given in given:
        assert ("token_type_ids" in columns) == (kind == "bert")
        assert "token_type_ids" in columns_given


def test_a_decoder_without_a_padding_token_takes_the_tokenizers(tmp_path):
    """As GPT-2's and Llama's checkpoints have none: without one they refuse a batch."""
    run = toy.distill("kd", tmp_path / "run", teacher=toy.teacher("gpt2", pad_token_id=None))
    assert_left(run, "kd")
    assert models.config_of(str(run.student)).pad_token_id == toy.tokenizer().pad_token_id


def test_texts_fit_both_models(tmp_path):
    """A teacher with fewer positions than the student decides where a text is cut."""
    short = toy.teacher("bert", max_position_embeddings=8)
    run = toy.distill("rail-kd-l", tmp_path / "run", teacher=short, student=toy.teacher("bert", layers=2))
    assert_left(run, "rail-kd-l")


def test_labels_are_not_needed_where_none_are_read(tmp_path):
    lines = Path(toy.data()["train"]).read_text("utf8").splitlines()
    bare = toy.write_csv(tmp_path / "bare.csv", ("text",), [(line.rpartition(",")[0],) for line in lines[1:]])
    run = toy.distill("simkd", tmp_path / "run", teacher=toy.teacher("bert"), train=bare)
    assert run.scores["student"] is None
    assert set(run.scores) == SCORES
    assert [line["step"] for line in toy.losses(run.folder)] == [1, 2, 3]
    assert models.config_of(str(run.student)).id2label == {0: "farm", 1: "wild"}


def test_a_test_file_is_what_counts(tmp_path):
    run = toy.distill("kd", tmp_path / "run", teacher=toy.teacher("bert"), test=toy.data(64, 31)["eval"], **toy.data())
    assert run.scores["split"] == "test"
    assert run.scores["selected_on"] == "dev"
    assert set(run.scores["splits"]) == {"dev"}
    assert run.scores["student"] == run.scores["metrics"]["student"]["accuracy"]


def test_without_a_size_the_student_is_half_the_teacher(tmp_path, capsys):
    run = limbeck.distill(
        "kd", teacher=toy.teacher("bert"), out=tmp_path / "run", set=["stages.*.steps=3"], **toy.data()
    )
    assert json.loads((run.student / "config.json").read_text())["num_hidden_layers"] == 2
    assert "half the teacher's layers" in capsys.readouterr().err


def test_another_tasks_classifier_is_made_anew(tmp_path, capsys):
    """From one task's model to another's, as from MNLI to RTE."""
    run = limbeck.finetune(
        toy.teacher("bert", labels=("a", "b", "c")), out=tmp_path / "run", set=["stages.*.steps=3"], **toy.data()
    )
    assert json.loads((run.student / "config.json").read_text())["id2label"] == {"0": "farm", "1": "wild"}
    assert "predicts a, b, c" in capsys.readouterr().err
