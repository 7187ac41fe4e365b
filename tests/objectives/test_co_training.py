"""A teacher that trains: what comes after its stage learns from what it has become."""

import pytest
import torch

from limbeck import LimbeckError
from limbeck.engine import loop
from tests import toy

RECIPE = """
name: two-stages
init: [layers(first)]
stages:
  - {name: together, steps: 2, batch: 16, lr: 1e-2, objectives: {teaching: {co_training: kl}}}
  - {name: after, steps: 2, batch: 16, lr: 1e-3, objectives: {logits: {logits: kl}}}
"""


def test_resumed_after_its_stage(tmp_path, monkeypatch):
    """The copy of the teacher that trained is gone by then: the checkpoint has to hold what it became."""
    recipe = tmp_path / "two-stages.yaml"
    recipe.write_text(RECIPE, encoding="utf8")

    def run(name, **options):
        toy.distill(str(recipe), tmp_path / name, teacher=toy.teacher("bert"), steps=None, **options)
        return toy.weights(tmp_path / name)

    whole = run("whole")
    step, taken = loop.Step.__call__, []

    def stopping(self, *args):
        if len(taken) == 2:
            raise KeyboardInterrupt
        taken.append(step(self, *args))

    monkeypatch.setattr(loop.Step, "__call__", stopping)
    with pytest.raises(KeyboardInterrupt):
        run("resumed")
    monkeypatch.undo()
    resumed = run("resumed", resume=True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_other_data_have_no_labels_of_the_task(tmp_path):
    other = toy.write_csv(tmp_path / "other.csv", ("text",), [(text,) for text in toy.words_of()["train"]])
    with pytest.raises(LimbeckError, match="the stage learns from labels"):
        toy.distill("prokt", tmp_path / "run", teacher=toy.teacher("bert"), set=(f"stages.*.data={other}",))
    assert not (tmp_path / "run").exists()
