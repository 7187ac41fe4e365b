"""The table of recipes and kinds in docs/tasks.md names every recipe, and refuses what is refused."""

import re
from contextlib import nullcontext

import pytest

from limbeck import recipe as book
from limbeck.data.kinds import KINDS
from limbeck.data.spec import DataSpec
from limbeck.errors import LimbeckError
from limbeck.prepare import prepare
from limbeck.request import request
from tests import toy
from tests.invariants import test_running_text as running
from tests.recipes import test_every_kind as every_kind

COLUMNS = ("classification", "tagging", "question-answering", "causal-lm", "seq2seq", "text")
SECTION = (toy.ROOT / "docs" / "tasks.md").read_text("utf8").split("## Recipes for every kind")[1].split("\n## ")[0]
# The recipes of each row, and what is said of them for each kind: a mark, and the number of a note.
ROWS = [
    (re.findall(r"`(.+?)`", recipes), [mark.strip() for mark in marks])
    for recipes, *marks in (row.split("|")[1:-1] for row in SECTION.splitlines() if row.startswith("| `"))
]
CASES = [(names[0], kind, mark) for names, marks in ROWS for kind, mark in zip(COLUMNS, marks, strict=True)]


def asked(kind):
    """Files and a teacher for a kind. The table is about a decoder that is not T5's."""
    if kind == "text":
        return running.teacher(), {**running.texts(), "kind": kind}
    if kind == "seq2seq":
        return toy.teacher("bart", labels=2, auto=KINDS[kind].auto), every_kind.data(kind)
    return every_kind.teacher(kind), every_kind.data(kind)


def test_every_recipe_is_there_once():
    assert sorted(name for names, _ in ROWS for name in names) == book.shipped()


def test_every_note_is_there():
    notes = set(re.findall(r"^(\d)\. ", SECTION, re.MULTILINE))
    assert {number for *_, mark in CASES for number in re.findall(r"\d", mark)} == notes
    assert all(re.fullmatch(r"[●○]( \(\d\))?|– \(\d\)", mark) for *_, mark in CASES)


@pytest.mark.parametrize(("recipe", "kind", "mark"), CASES)
def test_what_is_refused_is_marked(recipe, kind, mark):
    """Of each row, the first recipe."""
    model, files = asked(kind)
    who = {"student": model} if recipe == "finetune" else {"teacher": model}
    with pytest.raises(LimbeckError) if mark.startswith("–") else nullcontext():
        prepare(request(recipe, DataSpec(**files), layers=2, set=["stages.*.steps=1", "stages.*.batch=8"], **who))
