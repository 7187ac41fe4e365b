"""Whether kernels of our own run here: they need a GPU and Triton, which torch brings along where there is CUDA."""

from functools import cache
from importlib.util import find_spec


@cache
def compile_here() -> bool:
    """Whether there is a compiler for them."""
    return find_spec("triton") is not None
