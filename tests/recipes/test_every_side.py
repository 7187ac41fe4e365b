"""Recipes on models with an encoder and a decoder, from a file to a student that writes."""

import json
from io import StringIO

import pytest
from rich.console import Console
from transformers import AutoModelForSeq2SeqLM

import limbeck
from limbeck.architectures import shape
from limbeck.check import examine, shown
from limbeck.compare import compare
from limbeck.data.spec import DataSpec
from limbeck.errors import LimbeckError
from limbeck.prepare import prepare
from limbeck.request import request
from tests import toy


def data():
    return toy.kinds_data("pairs", lambda text: {"source": text, "target": " ".join(reversed(text.split()[:4]))})


def teacher(family, **options):
    return toy.teacher(family, labels=2, auto="AutoModelForSeq2SeqLM", **options)


@pytest.mark.parametrize("family", ["t5", "bart", "marian"])
def test_both_sides_are_compared_and_cut_apart(family, tmp_path):
    run = toy.distill(
        "cr-ild", tmp_path / "run", teacher=teacher(family), layers=3, decoder_layers=1, side="both", **data()
    )
    sizes = shape(AutoModelForSeq2SeqLM.from_pretrained(run.student))
    assert (sizes.at("encoder").layers, sizes.layers) == (3, 1)
    parts = toy.losses(run.folder)[0]
    assert {"hidden", "hidden-encoder", "attention-consistency-encoder"} <= parts.keys()
    assert parts["hidden"] != pytest.approx(parts["hidden-encoder"])


def test_other_head_counts_meet_as_in_the_paper_on_t5(tmp_path):
    """A smaller checkpoint of fewer, and other, heads."""
    student = teacher("t5", layers=2, width=16, heads=2, seed=1)
    run = toy.distill("cr-ild:t5", tmp_path / "run", teacher=teacher("t5"), student=student, **data())
    first, *_, last = toy.losses(run.folder)
    assert {"attention", "attention-consistency"} <= first.keys()
    assert "labels" in last


def test_a_model_learns_to_write(tmp_path):
    """Copy the first word: what is scored is what the saved student writes."""
    files = toy.kinds_data("copies", lambda text: {"source": text, "target": text.split()[0]})
    run = limbeck.finetune(
        teacher("bart", dropout=0.0, layers=2),
        out=tmp_path / "run",
        set=("stages.*.steps=150", "stages.*.batch=8", "stages.*.lr=3e-3"),
        quiet=True,
        kind="seq2seq",
        **files,
    )
    assert run.scores["metrics"]["student"]["exact_match"] > 60
    answers = tmp_path / "answers.jsonl"
    row = compare([str(run.student)], DataSpec(eval=files["eval"], kind="seq2seq"), answers)[0]
    assert row["scores"]["dev"] == pytest.approx(run.scores["metrics"]["student"])
    written = [json.loads(line)["prediction"] for line in answers.read_text("utf8").splitlines()]
    right = [text.split()[0] for text in toy.words_of()["eval"]]
    hits = sum(ours == theirs for ours, theirs in zip(written, right, strict=True))
    assert 100 * hits / len(right) == pytest.approx(row["scores"]["dev"]["exact_match"])


def test_half_of_either_side_unless_told():
    files = DataSpec(**data())
    prepared = prepare(request("kd", files, teacher=teacher("t5")))
    assert any("half the teacher's layers, 2 and 2" in note for note in prepared.notes)
    console = Console(width=120, record=True, file=StringIO())
    console.print(shown(examine(prepared, {})))
    assert "student: 2 encoder and 2 decoder layers" in console.export_text()
    student = prepare(request("kd", files, teacher=teacher("t5"), decoder_layers=1)).student
    assert (student.config.num_layers, student.config.num_decoder_layers) == (4, 1)


def test_layers_that_run_are_those_of_the_side_that_is_read():
    files, uneven = DataSpec(**data()), teacher("t5", num_decoder_layers=1)
    first = examine(
        prepare(request("l-ild", files, teacher=uneven, layers=2, decoder_layers=1, side="encoder")), {}
    ).stages[0]
    assert first.teacher_blocks == (4, 4)


def test_sides_are_for_models_that_have_two():
    with pytest.raises(LimbeckError, match="one stack of layers"):
        prepare(request("lwd", DataSpec(**toy.data()), teacher=toy.teacher(), layers=2, side="encoder"))
    with pytest.raises(LimbeckError, match="--decoder-layers is for models with an encoder"):
        prepare(request("lwd", DataSpec(**toy.data()), teacher=toy.teacher(), decoder_layers=2))
