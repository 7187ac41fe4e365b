"""Kernels of our own: whether they run, and how. They need a GPU, and Triton, which torch brings along with CUDA.

Having Triton is not enough: it needs a C compiler, and some GPUs that torch serves in bf16 are too old for its bf16.
"""

import warnings
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch


def run_on(device: torch.device) -> bool:
    """Whether they run there."""
    return device.type == "cuda" and _one_runs(device)


@cache
def _one_runs(device: torch.device) -> bool:
    """Whether one of them runs, both ways; if it fails, a warning says why."""
    if find_spec("triton") is None:
        return False
    try:
        from limbeck.squares import mean_squares

        with torch.inference_mode(False), torch.enable_grad():
            rows = torch.ones(1, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
            mean_squares(rows, torch.zeros_like(rows)).sum().backward()
            torch.cuda.synchronize(device)
    except Exception as error:  # whatever it is, torch's own kernels do not need it
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(f"limbeck's own kernels do not run here, and torch's do instead: {reason}", stacklevel=2)
        return False
    return True


def take(rows: torch.Tensor) -> bool:
    """Whether they take these rows: wide ones, one behind another, on a GPU and in fp32 or half precision."""
    known = rows.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return known and rows.is_contiguous() and 64 <= rows.shape[-1] <= 8192 and run_on(rows.device)


def grid(kernel: Any, *programs: int) -> Any:
    """A kernel, to be called with its arguments: so many programs of it, in one dimension or more."""
    return kernel[programs]
