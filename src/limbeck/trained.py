"""What a stage trains: the parameters its `train` list names, less those that no objective reaches."""

from collections.abc import Mapping

import torch
from torch import nn

from limbeck.distiller import Distiller
from limbeck.errors import LimbeckError
from limbeck.evaluation import evaluating
from limbeck.objectives import NamedAligner
from limbeck.recipe import Stage


def listed(distiller: Distiller, stage: Stage, aligners: Mapping[str, NamedAligner]) -> set[str]:
    """The names of the parameters that a stage's `train` list names."""
    modules = {target: _module(target, distiller, aligners) for target in stage.train}
    chosen = {id(parameter) for module in modules.values() if module for parameter in module.parameters()}
    return {name for name, parameter in distiller.named_parameters() if id(parameter) in chosen}


def _module(target: str, distiller: Distiller, aligners: Mapping[str, NamedAligner]) -> nn.Module | None:
    """What a word of the list stands for: the student, all that is trained beside it (`aligners`), an aligner with a
    name, or one side of it (`task.student`). An aligner that no term uses is nothing yet."""
    if target in ("student", "aligners"):
        return distiller.student if target == "student" else distiller.objectives
    name, dot, side = target.partition(".")
    module = aligners[name].module
    if module is None or not dot:
        return module
    if side not in dict(module.named_children()):
        raise LimbeckError(
            f'train: "{target}" is a side of aligner "{aligners[name].call}", which has no sides. Say {name} alone.'
        )
    return module.get_submodule(side)


def find_unreached(distiller: Distiller, batch: dict[str, torch.Tensor]) -> list[str]:
    """The parameters that would train and no objective reaches; an objective that reaches none is an error."""
    trained = {name: p for name, p in distiller.named_parameters() if p.requires_grad}
    if not trained:
        raise LimbeckError("nothing trains: the stage's train list, or a frozen start, leaves no parameter.")
    with evaluating(distiller):
        losses = distiller(**batch).losses
    reached: set[str] = set()
    for name, loss in losses.items():
        gradients = (
            torch.autograd.grad(loss.sum(), list(trained.values()), allow_unused=True, retain_graph=True)
            if loss.requires_grad
            else [None] * len(trained)
        )
        found = {parameter for parameter, gradient in zip(trained, gradients) if gradient is not None}
        if not found:
            raise LimbeckError(
                f'objective "{name}" reaches no parameter that trains, so it cannot change anything. Leave it out, or '
                "let what it reads train (the stage's train list, init without frozen=true)."
            )
        reached |= found
    return [name for name in trained if name not in reached]


def whole_modules(distiller: Distiller, names: set[str]) -> list[str]:
    """The largest modules that hold these parameters and no others."""
    others = {name for name, _ in distiller.named_parameters() if name not in names}
    mixed = {name[:end] for name in others for end in range(len(name)) if name[end] == "."}
    found = []
    for name in sorted(names):
        parts = name.split(".")
        paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
        found.append(next(path for path in paths if path not in mixed))
    return list(dict.fromkeys(found))
