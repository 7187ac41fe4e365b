"""Running text trains like any data: in pieces, over processes, resumed; and leaves a body that any task can take."""

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM

import limbeck
from limbeck import LimbeckError, scoring
from limbeck.compare import compare
from limbeck.data.spec import DataSpec
from limbeck.distiller import Distiller
from limbeck.engine import checkpoints as checkpoints_module
from limbeck.engine.held_out import held_out_loss
from limbeck.objectives import Match
from limbeck.prepare import prepare
from limbeck.request import request
from tests import toy
from tests.invariants.test_split import assert_close, torchrun
from tests.tiny import tiny_batch, tiny_model

SPLIT = {"steps": 5, "set": ("stages.*.lr=1e-3", "stages.*.batch=8", "stages.*.keep=last", "init=[layers(first)]")}


@cache
def texts():
    """Two files of documents, and the options that read them."""
    folder = toy.workplace() / "texts"
    folder.mkdir()
    words = {"train": toy.words_of(200, 32)["train"], "eval": toy.words_of(200, 32)["eval"]}
    for split, sentences in words.items():
        documents = ["\n".join(sentences[at : at + 5]) for at in range(0, len(sentences), 5)]
        (folder / f"{split}.txt").write_text("\n\n".join(documents), "utf8")
    named = {split: str(folder / f"{split}.txt") for split in words}
    return {**named, "kind": "text", "max_length": 32}


def teacher(**options):
    return toy.teacher("bert", headless=True, **{"dropout": 0.0, **options})


def distill(recipe, out, **options):
    return toy.distill(recipe, out, **{"teacher": teacher(), **texts(), **SPLIT, **options})


@cache
def whole():
    out = toy.workplace() / "whole-text"
    distill("att-kl:val-kl", out)
    return out


@pytest.mark.parametrize("head", ["MaskedLM", "TokenClassification", "QuestionAnswering"])
@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet"])
def test_any_head_will_do(family, head, tmp_path):
    """These have no pooler, which nothing reads here."""
    checkpoint = toy.save(
        toy.model(family, auto=f"AutoModelFor{head}"), tmp_path / "teacher", words=toy.tokenizer(family)
    )
    assert not [name for name in load_file(tmp_path / "teacher" / "model.safetensors") if "pooler" in name]
    distill("minilm", tmp_path / "run", teacher=checkpoint)
    assert {line["stage"] for line in toy.losses(tmp_path / "run")} == {"relations"}


def test_seeds_share_a_teacher_whose_pooler_is_drawn(tmp_path):
    checkpoint = toy.save(toy.model(auto="AutoModelForMaskedLM"), tmp_path / "teacher")
    for seed in (1, 2):
        pace = limbeck.Pace(cache=str(tmp_path / "cache"))
        distill("hid-seq", tmp_path / str(seed), teacher=checkpoint, seed=seed, pace=pace)
        assert ("answers once" in (tmp_path / str(seed) / "log.txt").read_text("utf8")) == (seed == 1)


def test_pieces_are_the_whole(tmp_path):
    distill("att-kl:val-kl", tmp_path / "run", pace=limbeck.Pace(log_every=1, micro_batch=3))
    assert_close(toy.weights(tmp_path / "run"), toy.weights(whole()))


@pytest.mark.slow
def test_two_processes_are_one(tmp_path, monkeypatch):
    """They start with no packed text: one packs, the other waits."""
    changes = [f"--set={change}" for change in (f"stages.*.steps={SPLIT['steps']}", *SPLIT["set"])]
    asked = toy.options(teacher=teacher(), layers=2, log_every=1, out=tmp_path / "run", **texts())
    monkeypatch.setenv("LIMBECK_CACHE", str(tmp_path / "cache"))
    done = torchrun("-m", "limbeck", "distill", "att-kl:val-kl", *asked, *changes)
    assert done.stderr.count("the student is in") == 1  # one process speaks
    assert len(list((tmp_path / "cache").rglob("*.tokens"))) == 2
    assert_close(toy.weights(tmp_path / "run"), toy.weights(whole()))
    ours, theirs = (toy.losses(run) for run in (tmp_path / "run", whole()))
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-5)


def test_resumed_in_the_middle_of_an_epoch(tmp_path, monkeypatch):
    options = {
        "teacher": teacher(dropout=0.1),
        "steps": None,
        "set": ("stages.*.epochs=2", "stages.*.batch=32", "stages.*.lr=1e-3", "init=[layers(first)]"),
        "pace": limbeck.Pace(log_every=1, save_every=0),
    }
    distill("hid-seq", tmp_path / "whole", **options)
    save, saved = checkpoints_module.Checkpoints.save, []

    class Killed(BaseException):
        pass

    def save_and_die(self, state, *args):
        save(self, state, *args)
        saved.append(state.step)
        if len(saved) == 2:
            raise Killed

    monkeypatch.setattr(checkpoints_module.Checkpoints, "save", save_and_die)
    with pytest.raises(Killed):
        distill("hid-seq", tmp_path / "killed", **options)
    monkeypatch.undo()
    epoch = len(toy.losses(tmp_path / "whole")) // 2
    assert 0 < saved[-1] < epoch
    distill("hid-seq", tmp_path / "killed", resume=True, **options)
    ours, theirs = toy.weights(tmp_path / "killed"), toy.weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert toy.metrics(tmp_path / "killed") == toy.metrics(tmp_path / "whole")


def test_the_lowest_loss_on_text_held_out_is_kept(tmp_path, monkeypatch):
    found, seen = iter([3.0, 1.0, 2.0, 1.0]), []

    def told(distiller, *args, **options):
        seen.append({name: weight.clone() for name, weight in distiller.student.state_dict().items()})
        return next(found)

    monkeypatch.setattr(scoring, "held_out_loss", told)
    run = distill("hid-seq", tmp_path / "run", steps=None, set=("stages.*.epochs=3", "init=[layers(uniform)]"))
    saved = toy.weights(run.folder)
    assert all(torch.equal(saved[name], seen[1][name]) for name in saved)
    assert (run.scores["metric"], run.scores["student"], run.scores["selected_on"]) == ("loss", 1.0, "dev")


def test_the_loss_on_text_held_out_is_the_mean_of_its_blocks():
    asked = {"teacher": teacher(), "layers": 2, "set": ["init=[layers(first)]"]}
    prepared = prepare(request("att-mse:hid-seq", DataSpec(**texts()), **asked))
    distiller, data = prepared.distillers[0].train(), prepared.evals["dev"]
    found = held_out_loss(distiller, data, batch=5, longest=32)
    assert distiller.training
    distiller.eval()
    blocks = [distiller(**data.batch([i], int(data.lengths[i]))).loss.item() for i in range(len(data))]
    assert len(blocks) % 5
    assert found == pytest.approx(sum(blocks) / len(blocks), rel=1e-5)


def test_a_teacher_has_its_answers_back_when_scoring_fails(monkeypatch):
    asked = {"teacher": teacher(), "layers": 2, "set": ["init=[layers(first)]"]}
    prepared = prepare(request("att-mse:hid-seq", DataSpec(**texts()), **asked))
    distiller, known = prepared.distillers[0], prepared.distillers[0].teacher
    monkeypatch.setattr(type(distiller), "forward", lambda self, **batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        held_out_loss(distiller, prepared.evals["dev"], batch=5, longest=32)
    assert distiller.teacher is known


@pytest.mark.parametrize("recipe", ["hid-seq", "att-mse", "minilm", "minilmv2", "tinybert", "cr-ild", "bert-emd"])
def test_terms_without_layers_are_left_out(recipe):
    asked = request(
        recipe, DataSpec(**texts()), teacher=teacher(), layers=2, set=["stages.*.batch=4", "init=[layers(first)]"]
    )
    prepared = prepare(asked)
    assert all(any(line in note for note in prepared.notes) for line in asked.left_out)
    assert asked.left_out
    for index in range(len(prepared.stages)):
        prepared.set_trained(index)
        parts = prepared.distillers[index](**prepared.probe()).parts
        assert parts.keys() == prepared.stages[index].objectives.keys()


@pytest.mark.parametrize(
    ("recipe", "fault"), [("kd", "compares no layers"), ("ted", "through filters"), ("simkd", "have none")]
)
def test_recipes_that_need_a_task_say_so(recipe, fault):
    with pytest.raises(LimbeckError, match=fault):
        prepare(request(recipe, DataSpec(**texts()), teacher=teacher(), layers=2))


def test_a_student_without_a_head_is_fine_tuned_on_a_task(tmp_path):
    run = distill("minilmv2", tmp_path / "run")
    assert type(AutoModel.from_pretrained(run.student)).__name__ == "BertModel"
    tuned = limbeck.finetune(run.folder, out=tmp_path / "tuned", set=["stages.*.steps=2"], quiet=True, **toy.data())
    assert tuned.scores["metric"] == "accuracy"


@pytest.mark.parametrize("family", ["bert", "mpnet", "deberta-v2", "modernbert", "albert", "gpt2", "llama"])
def test_a_body_gives_what_the_whole_model_gives(family):
    """The same weights with and without a classifier give the same losses."""
    batch, found = tiny_batch(100), []
    both = [(tiny_model(family), tiny_model(family, layers=2, seed=1))]
    bodies = [tiny_model(family, layers=n, seed=s, auto=AutoModel) for n, s in ((4, 0), (2, 1))]
    for whole_model, body in zip(both[0], bodies):
        body.load_state_dict(whole_model.base_model.state_dict(), strict=False)
    for models in (*both, bodies):
        terms = [Match(feature, map="uniform", distance=d) for feature, d in (("hidden", "mse"), ("attention", "kl"))]
        distiller = Distiller(*models, terms).eval()
        found.append({name: part.item() for name, part in distiller(**batch).parts.items()})
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_models_without_a_head_are_not_evaluated():
    with pytest.raises(LimbeckError, match="predict nothing"):
        compare([teacher()], DataSpec(kind="text", eval=texts()["eval"]))


def test_running_text_without_a_kind_is_asked_about(tmp_path):
    named = {name: texts()[name] for name in ("train", "eval")}
    with pytest.raises(LimbeckError, match=r"running text. Say with --kind what is learnt from it: .*text"):
        prepare(request("hid-seq", DataSpec(**named), teacher=toy.teacher("bert"), layers=2))


def masked_teacher(**options):
    return toy.teacher("bert", auto="AutoModelForMaskedLM", **{"dropout": 0.0, **options})


def test_hidden_words_are_learnt_alike_in_pieces_and_scored(tmp_path):
    asked = {**texts(), "kind": "masked-lm", "teacher": masked_teacher()}
    whole = distill("distilbert", tmp_path / "whole", **asked)
    pieces = distill("distilbert", tmp_path / "pieces", **asked, pace=limbeck.Pace(log_every=1, micro_batch=3))
    assert_close(toy.weights(pieces.folder), toy.weights(whole.folder))
    assert whole.scores["metric"] == "pseudo_perplexity"
    data = prepare(request("finetune", DataSpec(**{**texts(), "kind": "masked-lm"}), student=str(whole.folder)))
    model, held = AutoModelForMaskedLM.from_pretrained(whole.student).eval(), data.evals["dev"]
    losses = []
    for i in range(len(held)):
        batch = held.batch([i], int(held.lengths[i]))
        logits = model(batch["input_ids"], batch["attention_mask"]).logits
        chosen = batch["labels"] != -100
        losses += torch.nn.functional.cross_entropy(logits[chosen], batch["labels"][chosen], reduction="none").tolist()
    expected = torch.tensor(losses).double().mean().exp().item()
    assert whole.scores["student"] == pytest.approx(expected, rel=1e-4)


def test_a_masked_language_model_says_what_is_learnt_from_text():
    named = {name: texts()[name] for name in ("train", "eval")}
    prepared = prepare(request("distilbert", DataSpec(**named), teacher=masked_teacher(), layers=2))
    assert prepared.task.kind == "masked-lm"
    assert any("nothing is cached" in note for note in prepared.notes)
    assert not prepared.distillers[0].steady


def test_a_classifier_made_of_a_masked_language_model_keeps_its_pooler(tmp_path):
    """As bert-base-uncased has one, beside the head that finds words."""
    made = toy.model(auto="AutoModelForPreTraining")
    made.config.architectures = ["BertForMaskedLM"]
    folder = toy.save(made, tmp_path / "pre-trained")
    config = json.loads((tmp_path / "pre-trained" / "config.json").read_text("utf8"))
    config["architectures"] = ["BertForMaskedLM"]
    (tmp_path / "pre-trained" / "config.json").write_text(json.dumps(config), "utf8")
    prepared = prepare(request("finetune", DataSpec(**toy.data()), student=folder))
    assert torch.equal(prepared.student.bert.pooler.dense.weight, made.bert.pooler.dense.weight)
