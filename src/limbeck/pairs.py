"""The pairs of models the papers distil, each with the commands that train it."""

from importlib import resources
from typing import Any

import yaml

from limbeck.errors import LimbeckError

DATA = "--task rte --data glue/"


def pairs(recipe: str | None = None) -> list[dict[str, Any]]:
    """Paper, sizes, recipe, teacher and student of every pair, or of a recipe's, and the commands to type."""
    papers = yaml.safe_load((resources.files("limbeck") / "pairs.yaml").read_text("utf8"))
    every = [{"paper": paper, **pair, "commands": _commands(**pair)} for paper in papers for pair in papers[paper]]
    chosen = [pair for pair in every if recipe in (None, pair["recipe"])]
    if not chosen:
        listed = sorted({pair["recipe"] for pair in every})
        raise LimbeckError(
            f'no pair of models is listed for recipe "{recipe}". There are some for {", ".join(listed)}.'
        )
    return chosen


def _commands(sizes: str, recipe: str, teacher: str, student: str) -> list[str]:
    return [
        f"limbeck finetune --model {teacher} {DATA} --out runs/teacher",
        f"limbeck distill {recipe} --teacher runs/teacher {student} {DATA} --out runs/student",
    ]
