"""What a user sees while training: a bar with an ETA on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_EVERY = 20.0  # seconds between plain lines


class Display:
    """Speaks for the main process, on standard error; other processes stay silent."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.bar: Progress | None = None
        self.unkept: list[str] = []  # lines said before there is a file for them
        self.file: Path | None = None

    def say(self, line: str) -> None:
        """A line for the user."""
        (self.bar.console if self.bar else self.console).print(line, markup=False, soft_wrap=True)
        self.unkept.append(line)
        self._keep()

    def keep_in(self, file: Path) -> None:
        """Append all that was said, and will be, to a file, quiet or not."""
        self.file = file
        self._keep()

    def _keep(self) -> None:
        if self.file is not None:
            with self.file.open("a", encoding="utf8") as file:
                file.writelines(f"{line}\n" for line in self.unkept)
            self.unkept = []

    def start(self, name: str, steps: int, done: int) -> None:
        """A stage begins, or goes on."""
        self.name, self.steps, self.began, self.begun_at, self.spoke = name, steps, time.monotonic(), done, 0.0
        if self.console.is_terminal and not self.console.quiet:
            columns = ("[bold]{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[now]}")
            self.bar = Progress(
                *(TextColumn(c) if isinstance(c, str) else c for c in columns),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task(name, total=steps, completed=done, now="")
            self.bar.start()

    def step(self, done: int, values: Mapping[str, float] | None = None) -> None:
        """A step is done; `values` are its loss parts where they were read."""
        shown = " ".join(f"{k} {v:.4g}" for k, v in (values or {}).items())
        if self.bar:
            self.bar.update(self.task, completed=done)
            if shown:
                self.bar.update(self.task, now=shown)
        elif values and time.monotonic() - self.spoke > PLAIN_EVERY:
            self.spoke = time.monotonic()
            rate = (done - self.begun_at) / max(self.spoke - self.began, 1e-9)
            left = (self.steps - done) / rate if rate else 0
            self.say(f"{self.name}  step {done}/{self.steps}  {shown}  {rate:.2f} steps/s  {clock(left)} left")

    def stop(self) -> None:
        """The stage ended."""
        if self.bar:
            self.bar.stop()
            self.bar = None
            sys.stderr.flush()


def clock(seconds: float) -> str:
    """Seconds as a person reads them."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
