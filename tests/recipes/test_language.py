"""Language models from running text to a smaller one, as a user has them made."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from limbeck.data.spec import DataSpec
from limbeck.distiller import Distiller
from limbeck.errors import LimbeckError
from limbeck.initialisers import start_student
from limbeck.objectives import Labels, Logits
from limbeck.prepare import prepare
from limbeck.request import request
from tests import toy
from tests.tiny import tiny_batch, tiny_model

BLOCKS = {"max_length": 24}


def text(split):
    path = toy.workplace() / f"{split}.txt"
    path.write_text("\n\n".join(toy.words_of()[split]) + "\n", "utf8")
    return str(path)


def files():
    return {"train": text("train"), "eval": text("eval")}


def teacher(family="llama", **options):
    return toy.teacher(family, labels=2, auto="AutoModelForCausalLM", **options)


def test_from_the_command_line(tmp_path):
    """A text file and a causal model: nothing else has to be said."""
    asked = toy.options(teacher=teacher(), layers=2, out=tmp_path / "run", epochs=1, **files(), **BLOCKS)
    done = toy.command("distill", "ted", *asked)
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout + done.stderr
    scores = json.loads((tmp_path / "run" / "scores.json").read_text("utf8"))
    assert scores["metric"] == "perplexity"
    assert scores["retention"] == pytest.approx(100 * scores["teacher"] / scores["student"])
    recipe = (tmp_path / "run" / "recipe.yaml").read_text("utf8")
    assert "weight: 0.1" in recipe  # the paper's value for language models
    assert "less is better" in (tmp_path / "run" / "student" / "README.md").read_text("utf8")
    assert "perplexity ↓" in (tmp_path / "run" / "report.html").read_text("utf8")


def test_the_student_of_least_perplexity_is_kept(tmp_path):
    """At this rate it gets worse."""
    set_ = ("stages.*.epochs=2", "stages.*.lr=1", "stages.*.schedule=constant")
    run = toy.distill("kd", tmp_path / "run", teacher=teacher(), steps=None, set=set_, **files(), **BLOCKS)
    judged = [line["eval"]["perplexity"] for line in toy.metrics(run.folder) if "eval" in line]
    assert judged[-1] > min(judged)
    assert run.scores["student"] == pytest.approx(min(judged), rel=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_layers_come_with_embeddings_norm_and_head(tied):
    given = tiny_model("llama", 6, auto=AutoModelForCausalLM, tie_word_embeddings=tied)
    start = start_student(["layers(sanh)"], given, given, depth=3, labels={}, seed=0)
    ours, theirs = start.student, given
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert torch.equal(ours.state_dict()[name], theirs.state_dict()[name]), name
    assert not any("afresh" in note for note in start.notes)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_can_be_frozen_but_not_projected(tied):
    given = tiny_model("llama", 6, auto=AutoModelForCausalLM, tie_word_embeddings=tied)
    start = start_student(["layers(first)", "classifier(frozen=true)"], given, given, depth=3, labels={}, seed=0)
    assert start.frozen == {"model.embed_tokens.weight" if tied else "lm_head.weight"}
    assert (start.student.lm_head.weight is start.student.model.embed_tokens.weight) == tied
    with pytest.raises(LimbeckError, match="no map can stand before it"):
        start_student(["layers(first)", "classifier(project=true)"], given, given, depth=3, labels={}, seed=0)


def test_a_student_that_knows_the_first_words_alone():
    """Padded vocabularies differ within a family; the teacher's predictions are taken among what both know."""
    student = tiny_model("llama", 2, auto=AutoModelForCausalLM, vocab_size=90)
    given = tiny_model("llama", 4, auto=AutoModelForCausalLM, vocab_size=100)
    batch = tiny_batch(student)
    del batch["labels"]
    loss = Distiller(given, student, [Logits("kl")]).eval()(**batch).loss
    with torch.no_grad():
        weight, given.lm_head = given.lm_head.weight, torch.nn.Linear(32, 90, bias=False)
        given.lm_head.weight.copy_(weight[:90])
    cut = Distiller(given, student, [Logits("kl")]).eval()(**batch).loss
    torch.testing.assert_close(loss, cut)
    with pytest.raises(LimbeckError, match="predicts 100 words and the teacher 90"):
        Distiller(student, tiny_model("llama", 2, auto=AutoModelForCausalLM, vocab_size=100), [Logits("kl")])


def test_padding_and_pieces_do_not_matter():
    student, given = (tiny_model("llama", n, auto=AutoModelForCausalLM).double() for n in (2, 4))
    distiller = Distiller(given, student, [Labels(), Logits("kl(temperature=2)")]).eval()
    whole, longer = tiny_batch(student, (9, 5, 7)), tiny_batch(student, (9, 5, 7), length=16)
    pieces = [{k: v[i : i + 1] for k, v in whole.items() if k != "labels"} for i in range(3)]
    for batch in (whole, longer):
        del batch["labels"]
    expected = distiller(**whole).loss
    torch.testing.assert_close(distiller(**longer).loss, expected)
    torch.testing.assert_close(torch.stack([distiller(**piece).loss for piece in pieces]).mean(), expected)


def test_a_classifier_is_no_language_model():
    with pytest.raises(LimbeckError, match="Say with --kind what is learnt from it"):
        prepare(request("kd", DataSpec(**files()), teacher=toy.teacher("llama"), layers=2))
    with pytest.raises(LimbeckError, match="is a causal-lm task"):
        prepare(request("kd", DataSpec(kind="causal-lm", **files()), teacher=toy.teacher("llama"), layers=2))


def test_filters_without_a_filter_have_nothing_to_learn():
    asked = request(
        "ted", DataSpec(**files(), **BLOCKS), teacher=teacher(), layers=2, set=["aligners.task=filters(none)"]
    )
    with pytest.raises(LimbeckError, match=r"output embedding, which does not train. Use filters\(linear\)"):
        prepare(asked)


def test_models_of_other_words_are_not_compared(tmp_path):
    from limbeck.compare import compare
    from limbeck.data import grammar

    other = grammar.build_tokenizer(["a few other words ."] * 3)
    strange = toy.save(toy.model("llama", auto="AutoModelForCausalLM"), tmp_path / "strange", words=other)
    with pytest.raises(LimbeckError, match="read different vocabularies"):
        compare([teacher(), strange], DataSpec(eval=text("eval")))
