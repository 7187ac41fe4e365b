"""limbeck turns a large transformer into a small one that keeps its quality.

The public names load when they are first used: importing limbeck, or asking its command line for help, does not
import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from limbeck.errors import LimbeckError

if TYPE_CHECKING:
    from limbeck.distiller import Distiller
    from limbeck.engine.loop import Pace
    from limbeck.objectives import Labels, Logits, Match
    from limbeck.run import Run, distill, finetune

__version__ = "0.1.0"
__all__ = ["Distiller", "Labels", "LimbeckError", "Logits", "Match", "Pace", "Run", "distill", "finetune"]

_HOMES = {
    "Distiller": "distiller",
    "Labels": "objectives",
    "Logits": "objectives",
    "Match": "objectives",
    "Pace": "engine.loop",
    "Run": "run",
    "distill": "run",
    "finetune": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'limbeck' has no attribute {name!r}")
    return getattr(import_module(f"limbeck.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
