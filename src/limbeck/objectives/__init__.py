"""The terms of a loss, one kind a file. Each says what it reads and returns one number an example.

An objective is declared by call strings (`Match("cls", map="uniform", distance="unit_mse", weight=100)`) and bound once
to the shapes of the two models, which settles its layers, widths and aligners. A new kind is a file here and a line in
the table.
"""

from collections.abc import Container, Mapping
from typing import Any

from torch import nn

from limbeck.aligners import ALIGNERS
from limbeck.errors import LimbeckError, did_you_mean
from limbeck.objectives.base import Models, Moment, NamedAligner, Objective, Read, per_example, ramp
from limbeck.objectives.co_training import CoTraining
from limbeck.objectives.consistency import Consistency
from limbeck.objectives.context import Context
from limbeck.objectives.contrast import Contrast
from limbeck.objectives.earth_mover import EarthMover
from limbeck.objectives.heads import Heads
from limbeck.objectives.match import Match
from limbeck.objectives.predictions import Labels, Logits
from limbeck.objectives.probe import Probe
from limbeck.objectives.replacement import Replacement
from limbeck.spec import bind, options_of, parse

OBJECTIVES: dict[str, type[Objective]] = {
    "labels": Labels,
    "logits": Logits,
    "match": Match,
    "probe": Probe,
    "heads": Heads,
    "earth_mover": EarthMover,
    "contrast": Contrast,
    "context": Context,
    "consistency": Consistency,
    "replacement": Replacement,
    "co_training": CoTraining,
}

__all__ = [
    "OBJECTIVES",
    "CoTraining",
    "Consistency",
    "Context",
    "Contrast",
    "EarthMover",
    "Heads",
    "Labels",
    "Logits",
    "Match",
    "Models",
    "Moment",
    "NamedAligner",
    "Objective",
    "Probe",
    "Read",
    "Replacement",
    "build",
    "check_inputs",
    "check_name",
    "kind_of",
    "per_example",
    "ramp",
    "word_for",
]


def check_name(name: str) -> None:
    """A term's name is also the name of a module in a distiller, and not every word can be one."""
    if "." in name or hasattr(nn.ModuleDict(), name):
        raise LimbeckError(f'"{name}" cannot name an objective: it has a dot, or is a word PyTorch keeps for itself.')


def check_inputs(objective: Objective, mixed: bool) -> None:
    """A term that sets mixed inputs apart from plain ones needs a stage that mixes."""
    if "plain" in objective.sides and not mixed:
        raise LimbeckError("tells mixed inputs from plain ones, and the stage mixes none: add mixup: beta(1.0) to it.")


def kind_of(declared: Mapping[str, Any]) -> str:
    """The kind of an objective, as its place in a recipe has it: exactly one."""
    kinds = [kind for kind in OBJECTIVES if kind in declared]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none of them"
        raise LimbeckError(f"an objective has exactly one of {', '.join(OBJECTIVES)}; here there is {found}.")
    return kinds[0]


def word_for(objective: Objective) -> str:
    """What recipes call its kind."""
    words = [kind for kind, its_class in OBJECTIVES.items() if its_class is type(objective)]
    return words[0] if words else type(objective).__name__.lower()


def build(declared: Mapping[str, Any], aligners: Container[str] = ()) -> Objective:
    """An objective from its place in a recipe: exactly one kind, and that kind's options."""
    kind = kind_of(declared)
    allowed = options_of(OBJECTIVES[kind])
    options = {key: value for key, value in declared.items() if key != kind}
    for key in options:
        if key not in allowed:
            raise LimbeckError(
                f'"{kind}" has no option "{key}".{did_you_mean(key, allowed)} Allowed: {", ".join(allowed)}.'
            )
    align = parse(options.get("align", "none"))
    if align.name not in aligners:
        bind(align, ALIGNERS, "aligner")
    return OBJECTIVES[kind](declared[kind], **options)
