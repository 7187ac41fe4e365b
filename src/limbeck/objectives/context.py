"""Context: how an example's states relate to each other, among the tokens of a layer or the layers of a token."""

from collections.abc import Callable, Mapping
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from limbeck.distances import kl
from limbeck.errors import LimbeckError
from limbeck.mappings import MAPPINGS
from limbeck.objectives.base import Models, NamedAligner, Objective, Read, per_example
from limbeck.spec import Call, bind, parse
from limbeck.taps import Features

# A relation takes the states of both models, `(batch, layers, tokens, D)`, and the mask of the tokens, and gives one
# number an example.


def word_pairs(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """For each token, how alike the others of its layer are: KL of the two distributions, divided by the tokens."""
    others = mask.unsqueeze(1) & ~torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    divergence = _divergence(student, teacher, others.unsqueeze(1))
    return per_example(divergence, mask.unsqueeze(1).expand(divergence.shape)) / mask.sum(1).clamp_min(1)


def word_angles(student: Tensor, teacher: Tensor, mask: Tensor, *, window: Annotated[int, Field(ge=3)] = 21) -> Tensor:
    """The angle at each token between every two within the `window` around it: MSE of the cosines."""
    places, near = _window(mask, window)
    valid = (near.unsqueeze(-1) & near.unsqueeze(-2)).unsqueeze(1)
    ours, theirs = (_angles(states[:, :, places] - states.unsqueeze(3)) for states in (student, teacher))
    return per_example((ours - theirs).square(), valid.expand(ours.shape))


def layer_pairs(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """For each token and layer, how alike its states in the other layers are: KL, divided by the layers."""
    layers = student.shape[1]
    others = ~torch.eye(layers, dtype=torch.bool, device=mask.device)
    divergence = _divergence(student.transpose(1, 2), teacher.transpose(1, 2), others)
    return per_example(divergence, mask.unsqueeze(-1).expand(divergence.shape)) / layers


def layer_angles(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """The angle at a token's state in each layer between its states in every two others: MSE of the cosines."""
    ours, theirs = (
        _angles(s.unsqueeze(2) - s.unsqueeze(3)) for s in (student.transpose(1, 2), teacher.transpose(1, 2))
    )
    return per_example((ours - theirs).square(), mask[:, :, None, None, None].expand(ours.shape))


RELATIONS: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (word_pairs, word_angles, layer_pairs, layer_angles)
}


class Context(Objective):
    """A relation among the student's own states against the same among the teacher's (Park et al., 2021).

    Nothing is projected, since relations have no width. `map` says which layers are aligned; relations between tokens
    are averaged over them.
    """

    compares_layers = True

    def __init__(self, context: str | Call, *, map: str | Call, weight: float | str = 1.0) -> None:
        super().__init__(weight)
        self.call = parse(context)
        self.relation = bind(self.call, RELATIONS, "relation")
        self.mapping = bind(parse(map), MAPPINGS, "map")

    def bind(self, models: Models, named: Mapping[str, NamedAligner]) -> None:
        if models.teacher is None:
            raise LimbeckError(f"context: {self.call} needs a teacher, and there is none. Give --teacher.")
        self.layers = self.mapping(models.student.layers, models.teacher.layers)
        if self.layers.draw or self.layers.groups or len(self.layers.student) < 2:
            raise LimbeckError(f"context: {self.call} needs a map that pairs two layers or more, once and for all.")

    def reads(self) -> set[Read]:
        return {Read("student", "hidden", s) for s in self.layers.student} | {
            Read("teacher", "hidden", t) for t in self.layers.teacher
        }

    def forward(self, student: Features, teacher: Features, batch: Mapping[str, Tensor]) -> Tensor:
        mask = student["hidden", self.layers.student[0]].mask
        ours = torch.stack([student["hidden", s].values for s in self.layers.student], 1)
        theirs = torch.stack([teacher["hidden", t].values for t in self.layers.teacher], 1)
        return self.relation(ours, theirs, mask)


def _divergence(student: Tensor, teacher: Tensor, allowed: Tensor) -> Tensor:
    """KL of how alike a state finds the `allowed` others: softmax of the cosines."""
    ours, theirs = (_alike(states, allowed) for states in (student, teacher))
    return kl(ours, theirs)


def _alike(states: Tensor, allowed: Tensor) -> Tensor:
    unit = F.normalize(states, dim=-1)
    cosines = unit @ unit.transpose(-1, -2)
    # Not -inf: a token without others would be NaN.
    lowest = torch.finfo(cosines.dtype).min
    return cosines.masked_fill(~allowed, lowest).softmax(-1).masked_fill(~allowed, 0.0)


def _angles(rays: Tensor) -> Tensor:
    """Cosines between all rays from a state: `(…, rays, D)` → `(…, rays, rays)`."""
    unit = F.normalize(rays, dim=-1)
    return unit @ unit.transpose(-1, -2)


def _window(mask: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The places around each token, `(tokens, window)`, and where both are tokens, `(batch, tokens, window)`."""
    length, reach = mask.shape[1], window // 2
    centre = torch.arange(length, device=mask.device).unsqueeze(1)
    places = centre + torch.arange(-reach, reach + 1, device=mask.device)
    inside = (places >= 0) & (places < length)
    places = places.clamp(0, length - 1)
    return places, inside & mask[:, places] & mask.unsqueeze(-1)
