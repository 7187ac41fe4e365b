"""Tensors that a product takes, and a residual sum after it.

Autograd makes two gradients of such a tensor and adds them by a kernel of its own. But the sum's comes first, since
what it adds was made from the product; so it waits here, and the product adds its own to it as it multiplies.
"""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class Fork:
    """One such tensor: where the sum's gradient waits for the product."""

    def __init__(self) -> None:
        self.waiting: Tensor | None = None
        self.shared = False  # whether somebody else reads it too

    def leave(self, gradient: Tensor, *, shared: bool) -> None:
        """For the sum: its gradient, instead of handing it to autograd."""
        self.waiting, self.shared = gradient, shared

    def product(self, above: Tensor, weight: Tensor) -> Tensor:
        """For the product: the gradient of both."""
        waiting, self.waiting = self.waiting, None
        if waiting is None:
            return above @ weight
        rows, weighed = waiting.flatten(0, -2), above.flatten(0, -2)
        added = torch.addmm(rows, weighed, weight) if self.shared else rows.addmm_(weighed, weight)
        return added.view(waiting.shape)


class Forks:
    """Those of a forward, by tensor."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A forward begins: what another left is not its own."""
        self.by_tensor = WeakTensorKeyDictionary()
        self.joined: list[Fork] = []

    def open(self, x: Tensor) -> Fork:
        """A product takes this tensor."""
        fork = self.by_tensor[x] = Fork()
        return fork

    def join(self, x: Tensor) -> Fork | None:
        """A sum takes this tensor: its fork, if a product took it before and no other sum did."""
        fork = self.by_tensor.pop(x, None)
        if fork is not None:
            self.joined.append(fork)
        return fork

    def settle(self) -> None:
        """Once a backward has ended: no gradient may have been left behind."""
        joined, self.joined = self.joined, []
        if any(fork.waiting is not None for fork in joined):
            raise RuntimeError("a residual sum's gradient was left behind: no product came after it in the backward")
