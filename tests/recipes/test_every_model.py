"""Every shipped recipe on models that predict words, whichever way they are laid out.

A recipe takes two steps on every family. On one family of each layout it is a whole run, killed, resumed and saved;
which one differs from recipe to recipe, so that every family meets a part of the recipes that way. Encoders as
classifiers take turns likewise; test_every_recipe.py trains every recipe on each of them. What students score is a
matter of test_every_kind.py.
"""

import math
import re
import shutil
from functools import cache

import numpy as np
import pytest
import torch
import transformers

import limbeck
from limbeck import evaluation
from limbeck import recipe as book
from limbeck.data.kinds import KINDS
from limbeck.data.plan import padded
from limbeck.data.spec import DataSpec
from limbeck.engine.checkpoints import Checkpoints
from limbeck.engine.step import Step
from limbeck.errors import LimbeckError
from limbeck.prepare import prepare
from limbeck.request import request
from tests import toy
from tests.engine.test_step import world

ENCODERS = ("modernbert", "albert", "deberta-v2")
FAMILIES = {
    "seq2seq": ("t5", "bart", "marian"),
    "causal-lm": ("gpt2", "llama", "qwen2", "qwen3", "gemma2", "gemma3_text"),
    "masked-lm": ENCODERS,
    "classification": (*ENCODERS, "roberta", "distilbert", "electra", "mpnet"),
}
RECIPES = book.shipped()
# Why a recipe is not for a family or a kind of task; docs/tasks.md says it too.
REFUSED = {
    **{("universal-kd", kind): "predicted from every token" for kind in ("seq2seq", "causal-lm", "masked-lm")},
    ("theseus", "t5"): "makes the positions of all others",
    **{("theseus", family): "are of several types" for family in ("modernbert", "qwen2", "gemma2", "gemma3_text")},
}
WHOLE = [
    (recipe, kind, members[turn % len(members)])
    for turn, recipe in enumerate(RECIPES)
    for kind, members in FAMILIES.items()
]
STEPS_ALONE = [
    (recipe, kind, family)
    for recipe in RECIPES
    for kind, members in FAMILIES.items()
    for family in members
    if (recipe, kind, family) not in WHOLE and kind != "classification"
]
STEPS = 2


@cache
def files(kind):
    """As many texts as two steps take, and two to score on."""
    if kind == "classification":
        return toy.data(16, 4)
    rows = [{"source": text, "target": " ".join(text.split()[:3])} for text in toy.words_of()["train"][:18]]
    rows[-2:] = [row | {"target": row["target"].split()[0]} for row in rows[-2:]]
    if kind != "seq2seq":
        rows = [{"text": row["source"]} for row in rows]
    folder = toy.workplace() / f"few-{kind}"
    folder.mkdir()
    named = {"train": rows[:-2], "eval": rows[-2:]}
    found = {split: toy.write_jsonl(folder / f"{split}.jsonl", texts) for split, texts in named.items()}
    return found if kind == "seq2seq" else found | {"max_length": 12}


def asked(recipe, kind, family):
    """What a run asks for, as both doors take it."""
    model = toy.teacher(family, labels=toy.LABELS, auto=KINDS[kind].auto)
    who = {"student": model} if recipe == "finetune" else {"teacher": model}
    short = (f"stages.*.steps={STEPS}", "stages.*.batch=8", "stages.*.lr=1e-3")
    return {**who, "layers": 2, "set": short}, {"kind": kind, **files(kind)}


def test_what_is_refused_is_documented():
    told = re.split(r"\. |\n\n|\|\n", (toy.ROOT / "docs" / "tasks.md").read_text("utf8"))
    names = {
        "seq2seq": "as with language models",
        "causal-lm": "words are predicted at every one",
        "masked-lm": "masked",
        "t5": "T5",
        "modernbert": "ModernBERT",
        "gemma2": "Gemma 2 and 3",
        "gemma3_text": "Gemma 2 and 3",
        "qwen2": "Qwen2",
    }
    for recipe, what in REFUSED:
        sentences = [text for text in told if "refused" in text and names[what] in text]
        assert any(f"`{recipe}`" in text for text in sentences), (recipe, what)


def is_refused(recipe, kind, family):
    """Whether it is; then it says why."""
    said = REFUSED.get((recipe, kind)) or REFUSED.get((recipe, family))
    if said:
        options, data = asked(recipe, kind, family)
        with pytest.raises(LimbeckError, match=said):
            prepare(request(recipe, DataSpec(**data), **options))
    return bool(said)


@pytest.mark.parametrize(("recipe", "kind", "family"), STEPS_ALONE)
def test_takes_steps(recipe, kind, family):
    if is_refused(recipe, kind, family):
        return
    options, data = asked(recipe, kind, family)
    ready = prepare(request(recipe, DataSpec(**data), **options))
    ids = ready.train.by_length[:4]
    length = padded(ready.train.lengths[ids], ready.longest)
    for index, stage in enumerate(ready.stages):
        ready.set_trained(index)
        distiller = ready.distillers[index].train()
        step = Step(distiller, stage, world(), ready.train.on("cpu"))
        before = [weight.detach().clone() for weight in step.parameters]
        for at in range(STEPS):
            distiller.at(0, at)
            step([np.asarray(ids)], length, len(ids), 1e-3, at)
            assert all(math.isfinite(value) for value in step.read().values())
        assert any(not torch.equal(old, new) for old, new in zip(before, step.parameters, strict=True))
        distiller.finish()


def train(recipe, kind, family, out, **how):
    options, data = asked(recipe, kind, family)
    pace = limbeck.Pace(log_every=1, save_every=0)
    if recipe == "finetune":
        options["model"] = options.pop("student")
        return limbeck.finetune(out=out, pace=pace, quiet=True, **options, **data, **how)
    return limbeck.distill(recipe, out=out, pace=pace, quiet=True, **options, **data, **how)


@pytest.mark.parametrize(("recipe", "kind", "family"), WHOLE)
def test_is_killed_resumed_and_loaded(recipe, kind, family, tmp_path, monkeypatch):
    if is_refused(recipe, kind, family):
        return
    last, save = len(book.resolve(recipe).stages) - 1, Checkpoints.save

    def saving(self, state, *what):
        save(self, state, *what)
        if (state.stage, state.step) == (last, 1):  # what a run leaves that is killed now
            shutil.copytree(tmp_path / "whole", tmp_path / "killed")

    monkeypatch.setattr(evaluation, "evaluate", lambda model, data, task: dict.fromkeys(task.metrics, 50.0))
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", saving)
        whole = train(recipe, kind, family, tmp_path / "whole")
    run = train(recipe, kind, family, tmp_path / "killed", resume=True)
    assert toy.metrics(run.folder) == toy.metrics(whole.folder)
    assert len(toy.losses(run.folder)) == STEPS * (last + 1)
    for line in toy.losses(run.folder):
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
    loaded, faults = getattr(transformers, KINDS[kind].auto).from_pretrained(run.student, output_loading_info=True)
    assert not any(faults.values())
    expected, found = toy.weights(whole.folder), loaded.state_dict()
    for name, weight in toy.weights(run.folder).items():
        assert torch.equal(weight, expected[name]), name
        assert torch.equal(weight, found[name]), name
