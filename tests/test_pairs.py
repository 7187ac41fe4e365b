"""The papers' pairs of models: recipes that exist and accept their sizes, commands that parse, layers as printed."""

import re
import shlex

import pytest
import typer

from limbeck import LimbeckError
from limbeck.architectures import Shape
from limbeck.cli import app
from limbeck.objectives import Match, Models, NamedAligner, build
from limbeck.pairs import pairs
from limbeck.recipe import resolve
from limbeck.spec import parse

PAIRS = pairs()
every_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p['recipe']} {p['sizes']}")


def sizes(pair):
    """Teacher's and student's layers and width."""
    return [tuple(map(int, found)) for found in re.findall(r"(\d+)/(\d+)", pair["sizes"])]


def bound(pair):
    """Every objective of the pair's recipe, settled for models of these sizes."""
    teacher, student = (Shape(layers, width, width // 64, 2) for layers, width in sizes(pair))
    recipe = resolve(pair["recipe"])
    terms = [build(o, recipe.aligners) for stage in recipe.stages for o in stage.objectives.values()]
    named = {name: NamedAligner(parse(call)) for name, call in recipe.aligners.items()}
    for term in terms:
        term.bind(Models(student, teacher), named)
    return terms


@every_pair
def test_a_recipe_accepts_the_sizes_of_its_pair(pair):
    assert bound(pair)


@every_pair
def test_its_commands_parse(pair):
    commands = typer.main.get_command(app).commands
    teacher, student = [shlex.split(command)[1:] for command in pair["commands"]]
    made = commands[teacher[0]].make_context(teacher[0], teacher[1:])
    asked = commands[student[0]].make_context(student[0], student[1:])
    assert made.params["model"] == pair["teacher"]
    assert asked.params["recipe"] == pair["recipe"]
    assert asked.params["teacher"] == str(made.params["out"])
    assert asked.params["task"] == made.params["task"]
    (_, _), (layers, width) = sizes(pair)
    named = re.search(r"L-(\d+)_H-(\d+)", asked.params["student"] or "")
    assert asked.params["layers"] in (None, layers)
    assert asked.params["layers"] or asked.params["student"]
    assert named is None or named.groups() == (str(layers), str(width))


def test_the_pairs_of_one_recipe():
    assert {pair["recipe"] for pair in pairs("rail-kd-l")} == {"rail-kd-l"}
    with pytest.raises(LimbeckError, match=r'for recipe "kd"\. There are some for .*rail-kd-l'):
        pairs("kd")


@pytest.mark.parametrize(
    ("paper", "size", "layers"),
    [
        ("ILD-RTC", "12/768 → 6/768", [2, 4, 6, 8, 10]),
        ("ILD-RTC", "12/768 → 4/768", [3, 6, 9]),
        ("ILD-RTC", "12/768 → 12/768", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        ("ILD-RTC", "12/768 → 8/512", [1, 2, 3, 4, 5, 6, 7]),
        ("ILD-RTC", "12/768 → 2/128", [6]),
        ("How to distill your BERT", "12/768 → 3/768", [4, 8, 12]),
        ("RAIL-KD", "24/1024 → 6/768", list(range(1, 24))),
        ("CR-ILD", "12/768 → 6/768", [12]),
        ("TED", "12/768 → 6/768", [1, 3, 5, 8, 10, 12]),
        ("TED", "12/768 → 12/384", list(range(1, 13))),
        ("TED", "24/1024 → 12/384", [1, 3, 5, 7, 9, 11, 14, 16, 18, 20, 22, 24]),
    ],
)
def test_the_teachers_layers_are_the_papers(paper, size, layers):
    found = [pair for pair in PAIRS if (pair["paper"], pair["sizes"]) == (paper, size)]
    assert found
    for pair in found:
        terms = [term for term in bound(pair) if isinstance(term, Match) and term.sides == ("student", "teacher")]
        assert terms
        assert all(list(term.layers.teacher) == layers for term in terms)
