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
    chosen = [pair for pair in every if recipe in (None, pair["recipe"], pair["recipe"].partition(":")[0])]
    if not chosen:
        listed = sorted({pair["recipe"] for pair in every})
        raise LimbeckError(
            f'no pair of models is listed for recipe "{recipe}". There are some for {", ".join(listed)}.'
        )
    return chosen


def _commands(
    sizes: str,
    recipe: str,
    teacher: str,
    student: str,
    data: str = DATA,
    small: str = "",
    grid: str = "",
    pretrained: bool = False,
    taught: str = "",
    begun: str = "",
) -> list[str]:
    """Fine-tune the teacher, unless it is distilled as it is, and the student's start; distil; try a grid on that."""
    above = teacher if pretrained else "runs/teacher"
    commands = [] if pretrained else [_finetune(teacher, data, above, taught)]
    if small:
        commands.append(_finetune(small, data, "runs/small", begun))
    commands.append(f"limbeck distill {recipe} --teacher {above} {student} {data} --out runs/student")
    if grid:
        commands.append(f"limbeck finetune --model runs/student {DATA} {grid} --out runs/tuned")
    return commands


def _finetune(model: str, data: str, out: str, values: str) -> str:
    return " ".join(filter(None, ["limbeck finetune --model", model, data, values, "--out", out]))
