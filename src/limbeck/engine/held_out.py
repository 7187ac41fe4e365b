"""The loss of a stage on text held out: what a student without predictions is selected by."""

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
    known, device = distiller.teacher, next(distiller.parameters()).device
    if known is not None:  # it may have looked up its answers, which are to other examples
        distiller.teacher = Live(known.model.to(device), known.tap.sites)  # type: ignore[arg-type]
    tokens, total = data.on(device), torch.zeros((), device=device)
    distiller.at(0, distiller.steps)
    with evaluating(distiller):
        for start in range(0, len(data), batch):
            ids = np.arange(start, min(start + batch, len(data)))
            length = bucket(int(data.lengths[ids].max()), longest)
            tokens.fetch(ids, length)
            total += len(ids) * distiller(**tokens.batch(torch.from_numpy(ids).to(device), length)).loss
    if known is not None:
        distiller.teacher = known
    return float(total) / len(data)
