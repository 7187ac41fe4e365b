"""Kernels of our own: whether they run, and how. They need a GPU, and Triton, which torch brings along with CUDA."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch


def run_on(device: torch.device) -> bool:
    """Whether they run there."""
    return device.type == "cuda" and found()


@cache
def found() -> bool:
    """Whether there is a compiler for them."""
    return find_spec("triton") is not None


def grid(kernel: Any, *programs: int) -> Any:
    """A kernel, to be called with its arguments: so many programs of it, in one dimension or more."""
    return kernel[programs]
