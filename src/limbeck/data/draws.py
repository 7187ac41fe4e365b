"""Numbers that look random, made where they are needed: a captured step draws new ones from a key alone."""

from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Who draws, where numpy's generators do: what sets apart draws made from the same seed, stage and step.
PLAN, MIXUP, LABEL_NOISE, FEW = 1, 2, 3, 4


def key_for(*parts: int) -> int:
    """A key from several numbers: a run's seed, a stage, a step."""
    return Random("/".join(map(str, parts))).getrandbits(62)


def noise(places: "Tensor") -> "Tensor":
    """Numbers from 0 to 2⁶³ that look random, each a function of its place alone (the finaliser of SplitMix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        places = (places ^ _shifted(places, shift)) * (factor - 2**64)
    return (places ^ _shifted(places, 31)) & (2**63 - 1)


def _shifted(places: "Tensor", by: int) -> "Tensor":
    """Shifted right, with zeros from the left."""
    return (places >> by) & (2 ** (64 - by) - 1)
