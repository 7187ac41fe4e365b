"""BERT-of-Theseus: the loss of a model put together by hand from both, in double precision."""

import copy

import pytest
import torch
import torch.nn.functional as F

from limbeck.architectures import blocks
from limbeck.distiller import Distiller
from limbeck.initialisers import start_student
from limbeck.objectives import build
from limbeck.objectives.base import Moment
from limbeck.recipe import resolve
from tests.test_golden import close, doubled
from tests.tiny import columns_for, tiny_batch, tiny_model

RECIPES = {"theseus", "theseus:code", "theseus:constant"}


@pytest.mark.parametrize(
    ("recipe", "rates"),
    [
        ("theseus", {0: 0.1, 5000: 1 - 0.9 * 0.15 / 0.65, 6500: 1}),
        ("theseus:code", {0: 0.1, 1000: 0.7, 1500: 1}),
        ("theseus:constant", {0: 0.7, 2499: 0.7, 2500: 1}),
    ],
)
def test_theseus(recipe, rates):
    """CE of the model in which layer i is the student's, or two blocks of the teacher."""
    recipe = resolve(recipe)
    teacher = tiny_model("bert", 6, seed=1).double()
    start = start_student(recipe.init, teacher, teacher, depth=3, labels={"num_labels": 3}, seed=0)
    student = start.student.double().eval()
    with torch.no_grad():
        for parameter in blocks(student).parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    with doubled():
        objectives = {name: build(o) for name, o in recipe.stages[0].objectives.items()}
        distiller = Distiller(teacher, student, objectives, seed=5, steps=10000).eval()
    term, batch = distiller.terms["labels"], tiny_batch(student)
    assert {step: term.rate(Moment(step=step, progress=step / 10000)) for step in rates} == pytest.approx(rates)
    drawn = set()
    for step in (0, 300, 700, 9000):
        distiller.at(0, step)
        replaced = term.replaced.tolist()
        drawn.add(tuple(replaced))
        made = copy.deepcopy(teacher)
        layers = [
            [blocks(student)[i]] if ours else list(blocks(teacher)[2 * i : 2 * i + 2])
            for i, ours in enumerate(replaced)
        ]
        made.bert.encoder.layer = torch.nn.ModuleList(block for group in layers for block in group)
        made.config.num_hidden_layers = len(made.bert.encoder.layer)
        with torch.no_grad():
            expected = F.cross_entropy(made(**columns_for(made, batch)).logits, batch["labels"])
        close(distiller(**batch).loss.detach(), expected)
    assert len(drawn) > 1
    assert (True, True, True) in drawn
    trained = {name for name, _ in student.named_parameters()} - start.frozen
    assert trained == {name for name, _ in student.named_parameters() if ".encoder.layer." in name}
