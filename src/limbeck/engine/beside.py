"""A second stream for work that nobody waits for until the end of a step."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from limbeck.streams import Apart, captured

MOST = 1 << 29  # bytes held for what runs beside, before everything waits for it


class Beside:
    """Runs work beside the rest of a captured step, such as gradients of weights, which the next layer's backward does
    not need."""

    def __init__(self) -> None:
        self.apart = Apart()
        self.read: list[Tensor] = []  # by work that may still run: kept, lest their memory be given away

    @contextmanager
    def __call__(self, *read: Tensor) -> Iterator[None]:
        """In here, work that reads these tensors."""
        with self.apart():
            yield
        if captured():
            self.read += read
        if sum(tensor.nbytes for tensor in self.read) > MOST:
            self.join()

    def join(self) -> None:
        """Have what comes after wait for all of it."""
        if self.read:
            self.apart.join()
        self.read.clear()
