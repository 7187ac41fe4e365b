"""Every stage of every shipped recipe lowers its loss, and each part of it alone; one added later is tested too."""

import copy

import numpy as np
import pytest
import torch

from limbeck.data.plan import padded
from limbeck.data.spec import DataSpec
from limbeck.objectives import Contrast, CoTraining, EarthMover, Logits
from limbeck.prepare import prepare
from limbeck.request import request
from tests import toy
from tests.recipes.test_every_recipe import PAIRS

# So that a fixed draw has a layer of the student in it.
SETTINGS = {"theseus": ["stages.replace.objectives.labels.rate=linear(1.0)"]}


def prepared(recipe, family):
    """Two layers from four, without dropout, so that one batch has one loss."""
    teacher = toy.teacher(family, dropout=0.0)
    who = {"student": teacher} if recipe == "finetune" else {"teacher": teacher}
    settings = SETTINGS.get(recipe.partition(":")[0], [])
    ready = prepare(request(recipe, DataSpec(**toy.data()), layers=2, set=settings, **who))
    torch.manual_seed(0)
    with torch.no_grad():  # a student that is the teacher's layers may have nothing to learn from them
        for weight in ready.student.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return ready


def thirty_steps(ready, index, part=None):
    """The loss of a stage on a fixed batch, or one part of it, step by step. Draws are fixed, ramps half way."""
    ready.set_trained(index)
    distiller = ready.distillers[index].train()
    for module in distiller.modules():
        if isinstance(module, torch.nn.Dropout):  # of the heads that are trained beside the student
            module.p = 0.0
    for term in distiller.terms.values():
        # What moves with the states stays as it is: a loss that follows them may rise before it falls.
        if isinstance(term, Contrast):
            term.momentum = 1.0
        if isinstance(term, EarthMover):
            term._move = lambda costs: None
    distiller.at(0, distiller.steps // 2)
    lr = 1e-3 if "student" in ready.stages[index].train else 1e-2  # heads on a frozen model are slow to learn
    if any(isinstance(term, CoTraining) for term in distiller.terms.values()):
        lr = 2e-4  # two models that learn from each other are there in ten steps
    optimizer = torch.optim.AdamW([p for p in distiller.parameters() if p.requires_grad], lr=lr, fused=True)
    ids = np.arange(8)
    batch = ready.train.batch(ids, padded(ready.train.lengths[ids], ready.longest))
    mixed = distiller.mixup(batch) if distiller.mixup else batch
    answers = distiller.teacher.features(**mixed) if distiller.teacher else None  # they do not change
    # A cross-entropy of predictions falls to the entropy of the teacher's, a divergence to nothing.
    soft = {name: term for name, term in distiller.terms.items() if type(term) is Logits}
    floors = {name: float(term(answers, answers, batch).mean()) for name, term in soft.items()}
    floor = floors.get(part, 0.0) if part else sum(float(soft[name].scale) * low for name, low in floors.items())
    history = []
    for _ in range(30):
        output = distiller(teacher_features=answers, **batch)
        loss = output.parts[part] if part else output.loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(float(loss.detach()) - floor)
    return history


@pytest.mark.parametrize(("recipe", "family"), PAIRS)
def test_a_fixed_batch_gets_better(recipe, family):
    """One stage after the other."""
    ready = prepared(recipe, family)
    for index, stage in enumerate(ready.stages):
        history = thirty_steps(ready, index)
        assert 0 < history[-1] < 0.9 * history[0], stage.name
        # Not step by step: predictions are there in ten, and swing about where they meet.
        assert min(history[15:]) < min(history[:15]) < history[0], stage.name


@pytest.mark.parametrize(("recipe", "family"), PAIRS)
def test_each_part_alone_gets_better(recipe, family):
    ready = prepared(recipe, family)
    for index, stage in enumerate(ready.stages):
        start = copy.deepcopy(ready.distillers[index].state_dict())
        terms = ready.distillers[index].terms
        for part in terms if len(terms) > 1 else []:  # a single part is the whole
            ready.distillers[index].load_state_dict(start)
            history = thirty_steps(ready, index, part)
            # One of attention does not fall below the entropy of its target either.
            limit = 0.96 if stage.objectives[part].get("distance") == "soft_ce" else 0.8
            assert 0 < history[-1] < limit * history[0], f"{part} of stage {stage.name}"
