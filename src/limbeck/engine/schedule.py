"""How the learning rate moves: a linear warm-up, then linear, cosine or no decay."""

import math


def lr_factor(step: int, steps: int, warmup: float, schedule: str) -> float:
    """The share of the peak learning rate at `step` of `steps`, counted from 0; `warmup` is a share of the steps."""
    rising = steps_of(warmup, steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    done = (step - rising) / max(1, steps - rising)
    if schedule == "linear":
        return 1 - done
    return 0.5 * (1 + math.cos(math.pi * done)) if schedule == "cosine" else 1.0


def steps_of(share: float, steps: int) -> int:
    """How many steps a share of them is, rounded up; 0.07 of 100 are 7, though as floats they are a little more."""
    return math.ceil(round(share * steps, 6))
