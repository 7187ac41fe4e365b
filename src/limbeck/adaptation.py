"""A recipe for what it was not written for: other inputs for its layers, text without labels, an encoder's layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from limbeck.errors import LimbeckError
from limbeck.features import find_feature
from limbeck.objectives import OBJECTIVES, kind_of
from limbeck.recipe import Recipe
from limbeck.spec import parse


def supplemented(recipe: Recipe, data: str) -> Recipe:
    """The recipe with other data for its stages that compare layers alone, and so depend on no task (CR-ILD)."""
    stages = [
        replace(stage, data=data) if all(map(_compares_layers, stage.objectives.values())) else stage
        for stage in recipe.stages
    ]
    if stages == recipe.stages:
        raise LimbeckError(
            f'--supplement {data}: recipe "{recipe.name}" has no stage that compares layers alone. Take one that has, '
            "such as cr-ild, or leave it out."
        )
    return replace(recipe, stages=stages)


def _compares_layers(declared: Mapping[str, Any]) -> bool:
    return OBJECTIVES[kind_of(declared)].compares_layers


def layers_alone(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe without terms that read labels or predictions, and lines that say what is left out."""
    stages, said = [], []
    for stage in recipe.stages:
        kept = {name: term for name, term in stage.objectives.items() if _compares_layers(term)}
        left = [name for name in stage.objectives if name not in kept]
        if kept:
            stages.append(replace(stage, objectives=kept))
            said += [f"stage {stage.name}: {name} is left out: there are no labels and no predictions" for name in left]
        else:
            said.append(f"stage {stage.name} is left out: it compares no layers")
    if any(parse(call).name == "filters" for call in recipe.aligners.values()):
        raise LimbeckError(
            f'recipe "{recipe.name}" compares layers through filters that learn from labels, and running text has '
            "none. Take one without, such as hid-seq, att-kl or minilmv2."
        )
    if not stages:
        raise LimbeckError(
            f'recipe "{recipe.name}" compares no layers, and of running text alone there is nothing else to learn. '
            "Take one that does, such as hid-seq, att-kl or minilmv2; or data with labels."
        )
    return replace(recipe, stages=stages), said


def sided(recipe: Recipe, side: str) -> Recipe:
    """The recipe for models with an encoder and a decoder, where it is to compare layers of the encoder, or of `both`.

    What stays with the decoder are predictions, and terms whose aligner has a name: what they share is the decoder's.
    """
    if side not in ("encoder", "decoder", "both"):
        raise LimbeckError(f"--side {side}: there is no such side. Allowed: encoder, decoder, both.")
    if side == "decoder":
        return recipe
    stages = []
    for stage in recipe.stages:
        objectives: dict[str, dict[str, Any]] = {}
        for name, declared in stage.objectives.items():
            moved = _on_encoder(declared, recipe.aligners)
            if moved is None or side == "both":
                objectives[name] = declared
            if moved is not None:
                objectives[f"{name}-encoder" if side == "both" else name] = moved
        stages.append(replace(stage, objectives=objectives))
    if stages == recipe.stages:
        raise LimbeckError(
            f'--side {side}: recipe "{recipe.name}" compares no layers that an encoder has. Leave it out.'
        )
    return replace(recipe, stages=stages)


def _on_encoder(declared: Mapping[str, Any], aligners: Mapping[str, str]) -> dict[str, Any] | None:
    """A term that compares the same layers of the encoder; None where there is none."""
    kind, aligner = kind_of(declared), parse(declared.get("align", "none")).name
    if not OBJECTIVES[kind].moves_to_encoder or aligner in aligners or aligner == "filters":
        return None
    named = declared[kind]
    features = list(named) if isinstance(named, Mapping) else [named]  # earth_mover maps features to distances
    if any(find_feature(feature).rows == "prediction" for feature in features):
        return None
    there = [str(parse(feature).with_option("side", "encoder")) for feature in features]
    return {**declared, kind: dict(zip(there, named.values())) if isinstance(named, Mapping) else there[0]}
