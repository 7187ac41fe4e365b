"""The loss of a stage on text held out: what a student without predictions is selected by."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from limbeck.data.encoding import Encoded
from limbeck.data.plan import bucket
from limbeck.distiller import Distiller
from limbeck.evaluation import evaluating
from limbeck.teachers import Live


@torch.no_grad()
def held_out_loss(distiller: Distiller, data: Encoded, *, batch: int, longest: int) -> float:
    """The mean loss of an example, by the weights that the stage ends with and one draw, so that epochs compare."""
    device = next(distiller.parameters()).device
    tokens, total = data.on(device), torch.zeros((), device=device)
    distiller.at(0, distiller.steps)
    with _live_teacher(distiller, device), evaluating(distiller):
        for start in range(0, len(data), batch):
            ids = np.arange(start, min(start + batch, len(data)))
            length = bucket(int(data.lengths[ids].max()), longest)
            tokens.fetch(ids, length)
            total += len(ids) * distiller(**tokens.batch(torch.from_numpy(ids).to(device), length)).loss
    return float(total) / len(data)


@contextmanager
def _live_teacher(distiller: Distiller, device: torch.device) -> Iterator[None]:
    """In here the teacher runs: one that looks up its answers has those to other examples."""
    known = distiller.teacher
    if known is None:
        yield
        return
    distiller.teacher = Live(known.model.to(device), known.tap.sites)  # type: ignore[arg-type]
    try:
        yield
    finally:
        distiller.teacher = known
