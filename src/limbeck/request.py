"""What the user asked for: recipe, data, models and seed. Every fault of the recipe is found here."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from limbeck import models
from limbeck.adaptation import layers_alone, sided, supplemented
from limbeck.data import kinds
from limbeck.data.spec import DataSpec
from limbeck.errors import LimbeckError
from limbeck.recipe import Recipe, resolve
from limbeck.spec import allowing


@dataclass(frozen=True)
class Request:
    """What the user asked for; two equal requests give the same student."""

    recipe: Recipe
    data: DataSpec
    teacher: str | None = None
    student: str | None = None
    layers: int | None = None
    width: int | None = None
    seed: int = 42
    allow_code: bool = False
    decoder_layers: int | None = None
    left_out: tuple[str, ...] = ()  # lines that say what of the recipe the data have no use for

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "recipe": self.recipe.plain(), "data": _given(asdict(self.data))}


def request(
    recipe: str,
    data: DataSpec,
    *,
    set: Iterable[str] = (),
    allow_code: bool = False,
    teacher: str | None = None,
    student: str | None = None,
    layers: int | None = None,
    decoder_layers: int | None = None,
    side: str | None = None,
    width: int | None = None,
    seed: int = 42,
) -> Request:
    """Resolve the recipe for the task, with every fault reported at once."""
    if not 0 <= seed < 2**63:
        raise LimbeckError(f"--seed {seed} must be 0 or more, and below 2**63.")
    data = models.with_kind(data, teacher or student)
    with allowing(allow_code):
        resolved = resolve(recipe, task=data.task_name, overrides=set)
        if data.supplement:
            resolved = supplemented(resolved, data.supplement)
        left_out: list[str] = []
        if data.kind is not None and kinds.find_kind(data.kind).bare:
            resolved, left_out = layers_alone(resolved)
        if side:
            resolved = sided(resolved, side)
    return Request(
        resolved,
        data,
        teacher=teacher,
        student=student,
        layers=layers,
        decoder_layers=decoder_layers,
        width=width,
        seed=seed,
        allow_code=allow_code,
        left_out=tuple(left_out),
    )


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, as JSON has them."""
    given = {name: value for name, value in options.items() if value is not None}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
