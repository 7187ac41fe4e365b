"""What a model costs: parameters, FLOPs, latency; teacher against student."""

from collections.abc import Mapping
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from limbeck.data.encoding import Encoded
from limbeck.data.plan import padded
from limbeck.errors import LimbeckError
from limbeck.evaluation import arguments, evaluating

WARM_UP_ROUNDS = 3


def parameters(model: nn.Module) -> int:
    """How many numbers the model holds; a tied matrix counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def typical_batch(encoded: Encoded, batch_size: int = 1) -> dict[str, Tensor]:
    """The `batch_size` examples around the median length, padded as in training: what a user of the model sends it."""
    if len(encoded) == 0:
        raise LimbeckError("there is no example to time a model on. Give data with at least one row.")
    start = max(0, (len(encoded) - batch_size) // 2)
    ids = encoded.by_length[start : start + batch_size]
    return encoded.batch(ids, padded(encoded.lengths[ids], int(encoded.lengths.max())))


def latency(
    models: Mapping[str, PreTrainedModel],
    batches: Mapping[str, Mapping[str, Tensor]],
    *,
    repeats: int = 50,
    seconds: float = 3.0,
) -> dict[str, float]:
    """Milliseconds of one forward of its batch, by model: the median of `repeats` rounds, or of those in `seconds`.

    The models take turns, so that a busy or warming machine slows all of them alike and their ratio holds.
    """
    times: dict[str, list[float]] = {name: [] for name in models}
    ready = {name: arguments(model, batches[name]) for name, model in models.items()}
    with evaluating(*models.values()), torch.inference_mode():
        for _ in range(WARM_UP_ROUNDS):
            for name, model in models.items():
                _timed(model, ready[name])
        deadline = perf_counter() + seconds
        for _ in range(repeats):
            for name, model in models.items():
                times[name].append(_timed(model, ready[name]))
            if perf_counter() > deadline:
                break
    return {name: 1000 * median(measured) for name, measured in times.items()}


def flops(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> int:
    """Floating-point operations of one forward of `batch`: matrix products, each multiply-add counted as two."""
    counter = FlopCounterMode(display=False)
    # Fused attention kernels are counted on some devices only; the plain products are counted on all.
    with evaluating(model), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(**arguments(model, batch))
    return counter.get_total_flops()


def _timed(model: PreTrainedModel, columns: Mapping[str, Tensor]) -> float:
    """Seconds until the answer is there. Accelerators return before they finish, so both ends wait for them."""
    _wait(model.device)
    start = perf_counter()
    model(**columns)
    _wait(model.device)
    return perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
