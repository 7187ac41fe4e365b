"""Work beside the rest of a step that is captured: small batches leave much of a GPU idle."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Apart:
    """A stream of its own in a step that is captured. In any other step work runs where it stands."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """In here, work that runs apart, once all before it has been done."""
        if not captured():
            yield
            return
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Have what comes after wait for it."""
        if self.stream is not None and captured():
            torch.cuda.current_stream().wait_stream(self.stream)


def captured() -> bool:
    """Whether what runs now is captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
