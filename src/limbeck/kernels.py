"""Whether kernels of our own run: they need a GPU and Triton, which torch brings along where there is CUDA."""

from functools import cache
from importlib.util import find_spec

import torch


def run_on(device: torch.device) -> bool:
    """Whether they run there."""
    return device.type == "cuda" and found()


@cache
def found() -> bool:
    """Whether there is a compiler for them."""
    return find_spec("triton") is not None
