"""Ctrl-C and SIGTERM: heard between steps, so that what is saved is whole."""

import signal
import threading
from types import FrameType

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
