"""Every shipped recipe takes students of every shape, or says why its start cannot be."""

import pytest

from limbeck import architectures
from limbeck import recipe as book
from limbeck.data.spec import DataSpec
from limbeck.errors import LimbeckError
from limbeck.prepare import prepare
from limbeck.request import request
from limbeck.spec import parse
from tests import toy
from tests.recipes.test_every_recipe import RECIPES

DISTILLED = [recipe for recipe in RECIPES if recipe != "finetune"]
AMONG = [recipe for recipe in DISTILLED if recipe.startswith("theseus")]  # their layers stand among the teacher's
FREE = [recipe for recipe in DISTILLED if recipe not in AMONG]


def begun(recipe, *, teacher="bert", set=(), **who):
    """A run made ready, every stage of which has taken one step backwards: what was learnt from, by stage."""
    asked = request(recipe, DataSpec(**toy.data()), teacher=toy.teacher(teacher), set=set, **who)
    prepared = prepare(asked)
    for index, distiller in enumerate(prepared.distillers):
        prepared.set_trained(index)
        distiller.at(0, 0)
        distiller.zero_grad()
        loss = distiller(**prepared.probe()).loss
        loss.backward()
        assert loss.isfinite()
        moved = [p for p in distiller.student.parameters() if p.grad is not None and p.grad.abs().max() > 0]
        assert moved or "student" not in prepared.stages[index].train
    return prepared


def drawn(recipe):
    """The recipe's own start, with random weights in place of somebody's layers."""
    calls = [parse(call) for call in book.resolve(recipe).init]
    return f"init=[{', '.join('random' if call.name in ('layers', 'checkpoint') else str(call) for call in calls)}]"


@pytest.mark.parametrize("recipe", FREE)
def test_a_width(recipe):
    """From the teacher's own configuration: with a start at random, and else an error that says so."""
    prepared = begun(recipe, layers=2, width=16, set=[drawn(recipe)])
    assert architectures.shape(prepared.student)[:3] == (2, 16, 2)
    if drawn(recipe) != f"init=[{', '.join(book.resolve(recipe).init)}]":
        with pytest.raises(LimbeckError, match=r"width 16 cannot take layers of width 32.*random in place"):
            begun(recipe, layers=2, width=16)


def test_a_width_where_heads_do_not_add_up_to_it():
    """The teacher's four heads are 12 wide and its states 32: three heads of 16 meet three of the student's, 8 wide."""
    prepared = begun("minilmv2", teacher="qwen3", layers=2, width=16, set=[drawn("minilmv2")])
    sizes = architectures.shape(prepared.student)
    assert (sizes.width, sizes.heads, sizes.head_size, sizes.attends) == (16, 2, 12, 24)
    reads = prepared.distillers[0].terms["query"].reads()
    assert {read.feature for read in reads} == {"query_relation(heads=3)"}


@pytest.mark.parametrize("recipe", DISTILLED)
@pytest.mark.parametrize("family", ["bert", "deberta-v2"])
def test_other_head_counts(recipe, family):
    begun(recipe, teacher=family, student=toy.teacher(family, heads=2, layers=2, seed=1))


@pytest.mark.parametrize("recipe", DISTILLED)
@pytest.mark.parametrize("layers", [3, 4])
def test_deeper_than_half(recipe, layers):
    assert architectures.shape(begun(recipe, layers=layers).student).layers == layers


@pytest.mark.parametrize("recipe", FREE)
@pytest.mark.parametrize("family", ["mpnet", "distilbert"])
def test_another_family_with_the_same_vocabulary(recipe, family):
    """A classifier that computes something else is not reused, and the error says why."""
    student = toy.teacher(family, layers=2, seed=1)
    reused = any(parse(call).name == "classifier" for call in book.resolve(recipe).init)
    if family == "distilbert" and reused:
        with pytest.raises(LimbeckError, match=r"\(bert\) cannot be reused.*a tanh.*a relu.*--set init="):
            begun(recipe, student=student)
    else:
        assert begun(recipe, student=student).student.config.model_type == family


@pytest.mark.parametrize("recipe", AMONG)
@pytest.mark.parametrize("shape", [{"family": "mpnet"}, {"width": 16}])
def test_layers_among_the_teachers_need_its_family_and_width(recipe, shape):
    with pytest.raises(LimbeckError, match="one family and one width"):
        begun(
            recipe, student=toy.teacher(**{"family": "bert", "layers": 2, "seed": 1} | shape), set=["init=[checkpoint]"]
        )
