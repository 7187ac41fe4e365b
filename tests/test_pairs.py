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


def parsed(pair):
    """What the commands of a pair say, each as its options."""
    known, said = typer.main.get_command(app).commands, []
    for command in pair["commands"]:
        name, *words = shlex.split(command)[1:]
        said.append(known[name].make_context(name, words).params)
    return said


def asked(pair):
    """What the distillation of a pair is asked for."""
    return next(options for options in parsed(pair) if "recipe" in options)


def bound(pair):
    """Every objective of the pair's recipe, settled for models of these sizes."""
    teacher, student = (Shape(layers, width, width // 64, 2) for layers, width in sizes(pair))
    recipe = resolve(pair["recipe"], task=asked(pair).get("kind"))
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
    distil, made = asked(pair), [options for options in parsed(pair) if "recipe" not in options and not options["grid"]]
    (_, _), (layers, width) = sizes(pair)
    assert distil["recipe"] == pair["recipe"]
    models = ([] if pair.get("pretrained") else [pair["teacher"]]) + ([pair["small"]] if "small" in pair else [])
    assert [one["model"] for one in made] == models
    assert distil["teacher"] == (pair["teacher"] if pair.get("pretrained") else str(made[0]["out"]))
    if "small" in pair:
        assert (distil["student"], distil["set"][0]) == (str(made[1]["out"]), "init=[checkpoint]")
    assert all(distil[name] == one[name] for one in made for name in ("task", "data", "train", "kind"))
    named = re.search(r"L-(\d+)_H-(\d+)", distil["student"] or "")
    assert distil["layers"] in (None, layers)
    assert distil["layers"] or distil["student"]
    assert named is None or named.groups() == (str(layers), str(width))


@pytest.mark.parametrize(
    ("teacher", "values"),
    [
        ("google-t5/t5-base", [{"lr": 1e-3, "epochs": 10, "batch": 8}]),
        ("microsoft/deberta-v3-base", [{"lr": None}, {"lr": 6e-5}]),
        ("microsoft/deberta-v3-large", [{"lr": 7e-6}, {"lr": 6e-5}]),
    ],
)
def test_what_is_fine_tuned_has_the_papers_values(teacher, values):
    (pair,) = [pair for pair in PAIRS if pair["teacher"] == teacher]
    made = [options for options in parsed(pair) if "recipe" not in options]
    assert [{name: one[name] for name in expected} for one, expected in zip(made, values, strict=True)] == values


def test_a_batch_of_blocks_has_the_papers_tokens():
    (pair,) = [pair for pair in PAIRS if pair["teacher"] == "openai-community/gpt2"]
    assert asked(pair)["batch"] * asked(pair)["max_length"] == 4096


def test_a_body_is_fine_tuned_over_the_papers_grid():
    (pair,) = [pair for pair in PAIRS if "grid" in pair]
    body, tuned = parsed(pair)
    assert tuned["model"] == str(body["out"])
    assert tuned["grid"] == ["lr=1e-5,3e-5,5e-5,8e-5", "batch=16,32"]
    assert resolve(pair["recipe"], task=body["kind"]).init == ["random"]


def test_the_pairs_of_one_recipe():
    assert {pair["recipe"] for pair in pairs("rail-kd-l")} == {"rail-kd-l"}
    assert {pair["recipe"] for pair in pairs("cr-ild")} == {"cr-ild", "cr-ild:t5"}
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
        ("How to distill your BERT", "12/768 → 6/768", [12]),
        ("CR-ILD", "12/768 → 6/768", [12]),
        ("CR-ILD", "12/768 → 6/512", [12]),
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
