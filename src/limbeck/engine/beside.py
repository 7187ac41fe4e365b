"""A second stream for work that nobody waits for until the end of a step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MOST = 1 << 29  # bytes held for what runs beside, before everything waits for it


class Beside:
    """Runs work beside the rest of a captured step, such as gradients of weights: the next layer's backward does not
    need them, and small batches leave much of the GPU idle. In any other step the work runs where it stands.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.read: list[Tensor] = []  # by work that may still run: kept, lest their memory be given away

    @contextmanager
    def __call__(self, *read: Tensor) -> Iterator[None]:
        """In here, work that reads these tensors."""
        if not (read[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            yield
            return
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        self.read += read
        if sum(tensor.nbytes for tensor in self.read) > MOST:
            self.join()

    def join(self) -> None:
        """Have what comes after wait for all of it."""
        if self.stream is not None and self.read:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.read.clear()
