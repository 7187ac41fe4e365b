"""Which data a run reads, as the user named it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

from limbeck.data.tasks import find_task
from limbeck.errors import LimbeckError, did_you_mean

STRIDE = 128  # tokens


@dataclass(frozen=True)
class DataSpec:
    """A GLUE task from a folder or a hub id (`task`, `data`), or files of one's own (`train`, `eval`, `test`).

    `max_length` depends on the kind of task where it is not given; `stride` is how many tokens two windows of a context
    share. `few` and `label_noise` make the train set smaller or worse; `supplement` is other data for stages that
    compare layers alone.
    """

    task: str | None = None
    data: str | None = None
    train: str | None = None
    eval: str | None = None
    test: str | None = None
    text: str | None = None
    text_pair: str | None = None
    label: str | None = None
    labels: tuple[str, ...] | None = None
    kind: str | None = None
    max_length: int | None = None
    stride: int = STRIDE
    few: int | None = None
    label_noise: float | None = None
    supplement: str | None = None

    @classmethod
    def named(cls, **options: Any) -> "DataSpec":
        """What a user named: paths may be `Path`s, and labels a list, or a text with commas between them."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name in ("epochs", "lr", "batch"):
                raise LimbeckError(f'{name} is a value of the recipe: set=["stages.*.{name}={options[name]}"].')
            if name not in known:
                raise LimbeckError(
                    f'there is no option "{name}".{did_you_mean(name, known)} Data are said with {", ".join(known)}.'
                )
        plain: dict[str, Any] = {
            name: str(value) if isinstance(value, Path) else value for name, value in options.items()
        }
        if isinstance(labels := plain.get("labels"), str):
            plain["labels"] = tuple(name.strip() for name in labels.split(","))
        elif labels is not None:
            plain["labels"] = tuple(labels)
        return cls(**plain)

    @property
    def task_name(self) -> str | None:
        """The task as recipes spell it, or its kind where that is all there is to say."""
        return find_task(self.task).name if self.task else self.kind


class DataOptions(TypedDict, total=False):
    """The same as keywords of a function: paths may be `Path`s, and labels a list, or a text with commas between."""

    task: str
    data: str | Path
    train: str | Path
    eval: str | Path
    test: str | Path
    text: str
    text_pair: str
    label: str
    labels: str | Sequence[str]
    kind: str
    max_length: int
    stride: int
    few: int
    label_noise: float
    supplement: str
