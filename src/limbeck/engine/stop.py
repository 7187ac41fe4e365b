"""Ctrl-C and SIGTERM: heard between steps, so that what is saved is whole; and by all processes at the same step."""

import signal
import threading
from types import FrameType

import torch

from limbeck.engine.world import PATIENCE

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Inside, the first signal only sets `asked`; a second one ends the process as it would have without this."""

    def __init__(self) -> None:
        self.asked = False
        self.before: dict[int, object] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # no other thread may
            self.before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self.before = {}


class Vote:
    """What any process asks for, known to all of them at once: signals and clocks reach them at different steps.

    The votes travel between the hosts, so that nobody waits for a device.
    """

    def __init__(self) -> None:
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.group = torch.distributed.new_group(backend="gloo", timeout=PATIENCE) if together else None

    def __call__(self, *asked: bool) -> list[bool]:
        """Which of these somebody asks for. All processes call it, after the same step."""
        if self.group is None:
            return list(asked)
        votes = torch.tensor(asked, dtype=torch.uint8)
        torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MAX, group=self.group)
        return votes.bool().tolist()
