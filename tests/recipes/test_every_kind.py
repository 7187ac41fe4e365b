"""Every kind of task is fine-tuned, distilled, resumed and scored, from a file to a folder that transformers loads."""

import json
from typing import NamedTuple

import pytest
import torch
import transformers

import limbeck
from limbeck import architectures
from limbeck.check import examine
from limbeck.compare import compare
from limbeck.data.kinds import KINDS
from limbeck.data.spec import DataSpec
from limbeck.engine.loop import Loop
from limbeck.errors import LimbeckError
from limbeck.features import LOGITS
from limbeck.folder import RunFolder
from limbeck.initialisers import start_student
from limbeck.prepare import prepare
from limbeck.projector import folded
from limbeck.request import request
from limbeck.taps import Tap
from tests import toy
from tests.tiny import every_family, tiny_batch, tiny_model


class Case(NamedTuple):
    """Rows of a file from a sentence, and the labels of a teacher."""

    row: callable
    labels: tuple[str, ...] | int
    options: tuple[tuple[str, str], ...] = ()
    family: str = "bert"
    said: tuple[tuple[str, object], ...] = ()  # what a user says of the files


def lengths(text):
    """Labels by how many words there are."""
    count = len(text.split())
    return [name for name, has in (("even", count % 2 == 0), ("long", count > 6)) if has]


def tags(text):
    """Words with an a are entities, of two words where the next one has one too."""
    found = []
    for word in text.split():
        found.append("O" if "a" not in word else "I-A" if found and found[-1] != "O" else "B-A")
    return found


def asked(text):
    """Which word has an a? Some contexts take several windows, some have no answer."""
    words = text.split()
    answer = next((word for word in words if "a" in word and len(words) % 4), None)
    context = " ".join([text] * (80 // len(words) if len(words) % 3 == 0 else 1))
    found = {"text": [answer], "answer_start": [context.index(answer)]} if answer else {"text": [], "answer_start": []}
    return {"question": words[0], "context": context, "answers": found}


CASES = {
    "classification": Case(
        lambda text: {"text": text, "label": "even" if lengths(text)[:1] == ["even"] else "odd"}, ("even", "odd")
    ),
    "regression": Case(lambda text: {"text": text, "label": len(text) / 40}, 1),
    "multi-label": Case(
        lambda text: {"text": text, "labels": lengths(text)},
        ("even", "long"),
        (("problem_type", "multi_label_classification"),),
    ),
    "tagging": Case(lambda text: {"tokens": text.split(), "tags": tags(text)}, ("O", "I-A", "B-A")),
    "question-answering": Case(asked, 2),
    "causal-lm": Case(lambda text: {"text": text}, 2, family="llama", said=(("kind", "causal-lm"), ("max_length", 24))),
    "masked-lm": Case(lambda text: {"text": text}, 2, said=(("kind", "masked-lm"), ("max_length", 24))),
    "seq2seq": Case(lambda text: {"source": text, "target": " ".join(text.split()[:3])}, 2, family="t5"),
    "lambada": Case(lambda text: {"text": text}, 2, family="gpt2", said=(("kind", "lambada"),)),
}


SIZES = (48, 12)  # three steps an epoch
BATCH = "stages.*.batch=16"


def test_every_kind_is_here():
    """What predicts nothing is in tests/invariants/test_running_text.py."""
    assert set(CASES) == {name for name, kind in KINDS.items() if not kind.bare}


def data(kind):
    return toy.kinds_data(kind, CASES[kind].row, *SIZES) | dict(CASES[kind].said)


def teacher(kind, **options):
    case = CASES[kind]
    return toy.teacher(case.family, labels=case.labels, auto=KINDS[kind].auto, **dict(case.options), **options)


def distill(recipe, out, kind, **asked):
    return toy.distill(recipe, out, **{"teacher": teacher(kind), "set": (BATCH,), **data(kind), **asked})


def pace(**options):
    return limbeck.Pace(log_every=1, **options)


@pytest.fixture(params=CASES)
def kind(request):
    return request.param


def assert_whole(run, kind):
    """The scores are there and are the saved student's own; transformers loads it, as the card says."""
    scores = run.scores
    assert list(scores["metrics"]["student"]) == list(KINDS[kind].metrics)[: len(scores["metrics"]["student"])]
    assert scores["student"] is not None
    folder = run.student
    loaded = getattr(transformers, KINDS[kind].auto).from_pretrained(folder)
    assert dict(loaded.named_parameters()).keys() == toy.weights(run.folder).keys()
    assert KINDS[kind].auto in (folder / "README.md").read_text("utf8")
    spec = DataSpec(eval=data(kind)["eval"], **dict(CASES[kind].said))
    row = compare([str(folder)], spec, folder.parent / "answers.jsonl")[0]
    assert row["scores"]["dev"] == pytest.approx(scores["metrics"]["student"])
    assert row["agreement"]["dev"] == pytest.approx(100)
    answers = [json.loads(line) for line in (folder.parent / "answers.jsonl").read_text("utf8").splitlines()]
    assert len(answers) == SIZES[1] or KINDS[kind].packed


@pytest.mark.parametrize("recipe", ["kd", "lwd", "simkd", "ted"])
def test_distils(kind, recipe, tmp_path):
    run = distill(recipe, tmp_path / "run", kind)
    assert run.scores["teacher"] is not None
    assert all(torch.tensor(line["loss"]).isfinite() for line in toy.losses(run.folder))
    last = (run.folder / "log.txt").read_text("utf8").splitlines()[-1]
    less = run.scores["metric"] in KINDS[kind].lower
    assert ("less is better" in last) == less
    assert not (less and "% of the teacher's" in last + (run.student / "README.md").read_text("utf8"))
    assert_whole(run, kind)


def test_fine_tunes_a_bare_model_and_learns(kind, tmp_path):
    bare = toy.teacher(CASES[kind].family, labels=2, headless=True)
    run = limbeck.finetune(
        bare,
        out=tmp_path / "run",
        set=("stages.*.steps=30", "stages.*.lr=3e-3", BATCH),
        pace=pace(),
        quiet=True,
        **data(kind),
    )
    losses = [line["loss"] for line in toy.losses(run.folder)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert_whole(run, kind)


def test_a_classifier_of_another_kind_gives_way(kind, tmp_path):
    other = CASES["multi-label" if kind == "classification" else "classification"]
    given = toy.teacher(CASES[kind].family, labels=other.labels, **dict(other.options))
    if KINDS[kind].writes:  # a classifier on an encoder and a decoder is not known
        with pytest.raises(limbeck.LimbeckError, match="answers with a text"):
            limbeck.finetune(given, out=tmp_path / "run", **data(kind))
        return
    run = limbeck.finetune(
        given, out=tmp_path / "run", set=("stages.*.steps=1",), pace=pace(), quiet=True, **data(kind)
    )
    assert_whole(run, kind)


def test_is_checked(kind):
    asked = request("lwd", DataSpec(**data(kind)), teacher=teacher(kind), layers=2)
    report = examine(prepare(asked), {})
    assert {term.name for term in report.stages[0].terms} == {"labels", "logits", "layers"}


def test_cached_answers_and_pieces_are_the_same(kind, tmp_path):
    """What a live teacher says to a whole batch is what a cached one says to its pieces."""
    still = teacher(kind, dropout=0.0)
    runs = [
        distill("lwd", tmp_path / name, kind, teacher=still, steps=6, pace=how)
        for name, how in {"live": pace(cache="off"), "cached": pace(micro_batch=8)}.items()
    ]
    for ours, theirs in zip(*(toy.losses(run.folder) for run in runs), strict=True):
        ours.pop("stage"), theirs.pop("stage")
        assert ours == pytest.approx(theirs, abs=1e-4, rel=1e-4)


@pytest.mark.parametrize("family", every_family)
@pytest.mark.parametrize("kind", ["tagging", "question-answering"])
@torch.no_grad()
def test_every_family_has_a_head_over_tokens(kind, family):
    """What the head reads is known, and a student takes it over; under another width, or not at all."""
    auto = getattr(transformers, KINDS[kind].auto)
    if type(transformers.AutoConfig.for_model(family)) not in auto._model_mapping:
        pytest.skip("transformers has no such class")
    teacher = tiny_model(family, labels=2, auto=auto)
    seen, batch = [], tiny_batch(teacher)
    handle = architectures.dense_map(teacher).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    found = Tap(teacher, [("classifier_input", LOGITS), ("logits", LOGITS)])(**batch)
    handle.remove()
    torch.testing.assert_close(found["classifier_input", LOGITS].values, seen[0])
    assert found["logits", LOGITS].values.shape == (*batch["input_ids"].shape, 2)
    options = {"labels": KINDS[kind].settings(("a", "b")), "seed": 0}
    student = start_student(["layers", "classifier"], teacher, teacher, depth=2, **options).student
    for name, weight in architectures.output_map(student).named_parameters():
        assert torch.equal(weight, architectures.output_map(teacher).get_parameter(name))
    narrow = {"width": 16, "depth": 2, **options}
    if family == "modernbert":
        with pytest.raises(LimbeckError, match="wider than any model of transformers"):
            start_student(["random", "classifier"], teacher, teacher, **narrow)
    else:
        made = folded(start_student(["random", "classifier"], teacher, teacher, **narrow).student)
        assert architectures.output_map(made).in_features == 16


class Killed(BaseException):
    """Nothing may catch this, as nothing catches SIGKILL."""


def test_resumes_exactly(kind, tmp_path, monkeypatch):
    whole = distill("lwd", tmp_path / "whole", kind, steps=6)
    step = Loop._step

    def dying(self, *args):
        if args[3].step == 4:
            raise Killed
        step(self, *args)

    again = {"kind": kind, "steps": 6, "pace": pace(save_every=0.0)}
    monkeypatch.setattr(Loop, "_step", dying)
    with pytest.raises(Killed):
        distill("lwd", tmp_path / "killed", **again)
    monkeypatch.setattr(Loop, "_step", step)
    run = distill("lwd", tmp_path / "killed", resume=True, **again)
    assert not RunFolder(run.folder).checkpoints.exists()
    for name, weight in toy.weights(whole.folder).items():
        assert torch.equal(weight, toy.weights(run.folder)[name]), name
