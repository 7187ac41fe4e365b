"""How far apart: each distance maps two tensors of vectors `(…, D)` to `(…)`, one number a row.

A distance knows nothing of layers, masks or batches. To add one, write it here and name it in the table.
"""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from limbeck import kernels


def mse(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared difference over the dimensions. It takes half precision, and computes in fp32."""
    if _by_kernel(student, teacher):
        from limbeck.squares import mean_squares

        return mean_squares(student, teacher)
    return F.mse_loss(*torch.broadcast_tensors(exact(student), exact(teacher)), reduction="none").mean(-1)


def unit_mse(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared difference of the unit vectors (PKD, ILD-RTC)."""
    if _by_kernel(student, teacher):
        from limbeck.squares import unit_squares

        return unit_squares(student, teacher, mean=True)
    return mse(_unit(student), _unit(teacher))


def unit_sq(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared norm of the difference of the unit vectors (RAIL-KD)."""
    if _by_kernel(student, teacher):
        from limbeck.squares import unit_squares

        return unit_squares(student, teacher, mean=False)
    return (_unit(student) - _unit(teacher)).square().sum(-1)


def cosine(student: Tensor, teacher: Tensor) -> Tensor:
    """One minus the cosine of the angle between two vectors."""
    return 1 - F.cosine_similarity(student, teacher, dim=-1)


def kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher ‖ student) of two distributions; 0·log 0 counts as 0."""
    return (torch.xlogy(teacher, teacher) - teacher * _log(student)).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student ‖ teacher): the same two, the other way round."""
    return (student * (_log(student) - _log(teacher))).sum(-1)


def soft_ce(student: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy of the student's distribution under the teacher's."""
    return -(teacher * _log(student)).sum(-1)


DISTANCES = {f.__name__: f for f in (mse, unit_mse, unit_sq, cosine, kl, reverse_kl, soft_ce)}
OF_DISTRIBUTIONS = (kl, reverse_kl, soft_ce)  # these need rows that are distributions


# Predictions: the same distances, between logits. They work on log-probabilities, which do not underflow.

Temperature = Annotated[float, Field(gt=0)]
Scale = float | Literal["T2"]  # T² is read as T2
IMPOSSIBLE = -1e8  # no model's logit is as low


def logits_kl(
    student: Tensor, teacher: Tensor, *, temperature: Temperature = 1.0, scale: Scale = 1.0, mean: bool = False
) -> Tensor:
    """KL(teacher ‖ student) of the softened predictions. `scale=T²` keeps gradients alike across temperatures; `mean`
    is over the classes, where a divergence has their sum."""
    log_t = F.log_softmax(teacher / temperature, -1)
    parts = log_t.exp() * (log_t - F.log_softmax(student / temperature, -1))
    return _factor(scale, temperature) * (_mean(parts, teacher) if mean else parts.sum(-1))


def logits_soft_ce(student: Tensor, teacher: Tensor, *, temperature: Temperature = 1.0, scale: Scale = 1.0) -> Tensor:
    """Cross-entropy of the softened predictions: the gradient of `kl`, without the teacher's entropy."""
    targets = F.softmax(teacher / temperature, -1)
    return -_factor(scale, temperature) * (targets * F.log_softmax(student / temperature, -1)).sum(-1)


def logits_mse(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared difference of the logits; what every prediction distance becomes on a regression task."""
    return _mean((exact(student) - exact(teacher)).square(), teacher)


PREDICTIONS = {"kl": logits_kl, "soft_ce": logits_soft_ce, "mse": logits_mse}


def exact(states: Tensor) -> Tensor:
    """Half precision is compared in fp32; what is finer stays as it is."""
    return states.to(torch.promote_types(states.dtype, torch.float32))


def _by_kernel(student: Tensor, teacher: Tensor) -> bool:
    """Whether one kernel compares these rows."""
    return student.shape == teacher.shape and kernels.take(student) and kernels.take(teacher)


def _unit(vectors: Tensor) -> Tensor:
    return F.normalize(vectors, dim=-1)


def _log(probabilities: Tensor) -> Tensor:
    # The smallest normal number instead of 0: finite where the student gives a key no weight at all.
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


def _mean(parts: Tensor, logits: Tensor) -> Tensor:
    """The mean over classes. Where these are positions, padding is none of them: its logit is as low as can be."""
    return parts.sum(-1) / (logits > IMPOSSIBLE).sum(-1).clamp_min(1)


def _factor(scale: Scale, temperature: float) -> float:
    return temperature**2 if isinstance(scale, str) else scale
