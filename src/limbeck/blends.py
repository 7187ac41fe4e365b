"""How several teacher layers become the one a student layer is compared with.

A blend is given the teacher's width and, for each student layer, the places of its teacher layers in the list. It takes
the student's layers, brought to the teacher's width, and the teacher's, and gives one target a student layer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from limbeck.aligners import Anchor

Groups = Sequence[Sequence[int]]


class Blend(nn.Module):
    """One target a student layer, of the teacher layers of its group."""

    def __init__(self, width: int, groups: Groups) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, student: Sequence[Tensor], teacher: Sequence[Tensor]) -> list[Tensor]:
        """The targets, as many as student layers."""
        raise NotImplementedError

    def weights(self, student: Sequence[Tensor], teacher: Sequence[Tensor]) -> list[Tensor]:
        """How much of each layer of its group a student layer takes: `(batch, …, group)`, or one `(group,)` for all."""
        raise NotImplementedError


class Attention(Blend):
    """The teacher's layers weighted by the softmax of their products with the student's (ALP-KD).

    Nothing here trains, but gradients reach the student through the weights too.
    """

    def weights(self, student: Sequence[Tensor], teacher: Sequence[Tensor]) -> list[Tensor]:
        products = (_stacked(teacher, group) @ s.unsqueeze(-1) for s, group in zip(student, self.groups))
        return [product.squeeze(-1).softmax(-1) for product in products]

    def forward(self, student: Sequence[Tensor], teacher: Sequence[Tensor]) -> list[Tensor]:
        return [
            (weights.unsqueeze(-2) @ _stacked(teacher, group)).squeeze(-2)
            for weights, group in zip(self.weights(student, teacher), self.groups)
        ]


class Combine(Blend):
    """A linear map a student layer, of its teacher layers joined into one vector (CKD).

    The map starts as the mean of the layers, where a student made of them is not far from it, and trains. It could
    satisfy the loss with a constant if there were no other term; `frozen` keeps it at an orthogonal start.
    """

    def __init__(self, width: int, groups: Groups, *, frozen: bool = False) -> None:
        super().__init__(width, groups)
        self.maps = nn.ModuleList(
            Anchor(len(group) * width, width) if frozen else _mean(len(group), width) for group in groups
        )

    def weights(self, student: Sequence[Tensor], teacher: Sequence[Tensor]) -> list[Tensor]:
        """Each layer's share of its group's map, by the norm of its columns."""
        maps = [m.state_dict()["weight"] for m in self.maps]
        norms = [m.unflatten(1, (len(group), -1)).norm(dim=(0, 2)) for m, group in zip(maps, self.groups)]
        return [norm / norm.sum() for norm in norms]

    def forward(self, student: Sequence[Tensor], teacher: Sequence[Tensor]) -> list[Tensor]:
        return [m(torch.cat([teacher[i] for i in group], -1)) for m, group in zip(self.maps, self.groups)]


BLENDS = {"attention": Attention, "combine": Combine}


def _mean(layers: int, width: int) -> nn.Linear:
    """A linear map of joined layers that starts as their mean."""
    map_ = nn.Linear(layers * width, width)
    nn.init.zeros_(map_.bias)
    with torch.no_grad():
        map_.weight.copy_(torch.eye(width).repeat(1, layers) / layers)
    return map_


def _stacked(layers: Sequence[Tensor], group: Sequence[int]) -> Tensor:
    """The layers of a group, `(batch, …, group, D)`."""
    return torch.stack([layers[i] for i in group], -2)
