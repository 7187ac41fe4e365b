"""The losses of a student of another width under its teacher's classifier, against the papers' formulas."""

import pytest
import torch

from limbeck import architectures
from limbeck.distiller import Distiller
from limbeck.initialisers import start_student
from limbeck.objectives import build
from limbeck.recipe import resolve
from tests.test_golden import close, doubled, linear, unit
from tests.tiny import columns_for, tiny_batch, tiny_model

RECIPES = {"ild-rtc", "simkd"}


class Case:
    """A recipe's distiller over a teacher of width 32 and a student that starts as the recipe says."""

    def __init__(self, recipe, width, family="bert"):
        self.recipe = resolve(recipe)
        self.teacher = tiny_model(family, 6, seed=1).double()
        source = tiny_model(family, 3, width=width, seed=2)
        start = start_student(self.recipe.init, self.teacher, source, labels={"num_labels": 3}, seed=0)
        self.student, self.frozen = start.student.double().eval(), start.frozen
        with doubled():
            objectives = {n: build(o) for n, o in self.recipe.stages[0].objectives.items()}
            torch.manual_seed(3)
            self.distiller = Distiller(self.teacher, self.student, objectives).eval()
        self.batch = tiny_batch(self.student)
        self.s, self.t = (
            model(**columns_for(model, self.batch), output_hidden_states=True) for model in (self.student, self.teacher)
        )

    def read(self):
        """What each classifier reads."""
        ours, theirs = self.s.hidden_states[-1][:, 0], self.t.hidden_states[-1][:, 0]
        projector = architectures.projector(self.student)
        return (ours if projector is None else linear(projector, ours)), theirs


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "electra", "deberta-v2"])
@pytest.mark.parametrize("width", [32, 16])
def test_simkd(family, width):
    """MSE of what the one classifier reads; the projector is the student's own, and no second map is learnt."""
    case = Case("simkd", width, family)
    ours, theirs = case.read()
    output = case.distiller(**case.batch)
    close(output.loss.detach(), (ours - theirs).square().mean().detach())
    assert not list(case.distiller.objectives.parameters())
    output.loss.backward()
    moved = {n for n, p in case.student.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert any(".projector." in name for name in moved) == (width == 16)
    assert not moved & case.frozen


def test_ild_rtc():
    """α·CE + (1 - α)·KL + β·Σ over layers; the predictions are the teacher's classifier's, of the projected state."""
    case = Case("ild-rtc", 16)
    ours, _ = case.read()
    logits = linear(case.teacher.classifier, torch.tanh(linear(case.teacher.bert.pooler.dense, ours)))
    torch.testing.assert_close(case.s.logits, logits)
    maps = case.distiller.terms["layers"].aligner.maps
    hard = -torch.stack([z.log_softmax(-1)[y] for z, y in zip(logits, case.batch["labels"])]).mean()
    p, q = (torch.softmax(z / 10, -1) for z in (case.t.logits, logits))
    soft = (p * (p.log() - q.log())).sum(-1).mean()
    layers = sum(
        (unit(linear(maps[m - 1], case.s.hidden_states[m][:, 0])) - unit(case.t.hidden_states[2 * m][:, 0]))
        .square()
        .mean()
        for m in (1, 2)
    )
    close(case.distiller(**case.batch).loss.detach(), (0.5 * hard + 0.5 * soft + 100 * layers).detach())
