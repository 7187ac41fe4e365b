"""What dropout of our own draws its masks from."""

import torch
from torch import Tensor


class Draws:
    """The masks of one forward: one seed for all, and a number for each, so that no two are alike, also where a module
    runs twice.

    The seed is drawn on the device by torch's generator, so that a step that is captured draws as an eager one does.
    Where no dropout asks, nothing is drawn.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A forward begins: its first mask draws another seed."""
        self.seed: Tensor | None = None
        self.asked = 0

    def next(self, device: torch.device) -> tuple[Tensor, int]:
        """The seed, and the number of this mask."""
        if self.seed is None:
            self.seed = torch.randint(2**63 - 1, (), device=device)
        self.asked += 1
        return self.seed, self.asked
