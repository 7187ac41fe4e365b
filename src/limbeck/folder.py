"""The run folder: what lies where, and writes that leave the old file or the new one, never half of either."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from limbeck.errors import LimbeckError


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.yaml"
        self.request = self.path / "request.json"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.said = self.path / "log.txt"
        self.checkpoints = self.path / "checkpoints"
        self.scores = self.path / "scores.json"
        self.student = self.path / "student"
        self.report = self.path / "report.html"

    def aligners(self, stage: str | None = None) -> Path:
        """Where what was trained beside the student is kept: in the last stage, or in the earlier one of that name."""
        of = f"-{re.sub(r'[^A-Za-z0-9_.-]', '-', stage)}" if stage else ""
        return self.path / f"aligners{of}.safetensors"

    @property
    def finished(self) -> bool:
        """Whether the run ended; its scores are written last."""
        return self.scores.is_file()

    def log(self, record: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        with self.metrics.open("a", encoding="utf8") as file:
            file.write(json.dumps(record) + "\n")

    def logged(self) -> int:
        """How many bytes of metrics there are."""
        return self.metrics.stat().st_size if self.metrics.exists() else 0

    def cut_log(self, size: int) -> None:
        """Forget what was logged after a checkpoint: it will be logged again."""
        if self.logged() > size:
            os.truncate(self.metrics, size)


def check_place(path: Path, option: str) -> None:
    """Raise where the file or folder that `option` names could not be written: now, not when there is a result."""
    whole = path.absolute()
    there = next(place for place in (whole, *whole.parents) if os.path.exists(place))  # Path.exists may raise
    if there != whole and not there.is_dir():
        raise LimbeckError(f'{option} "{path}" lies below a file, {there}. Give another place.')
    home = there if there.is_dir() else there.parent
    if not os.access(home, os.W_OK | os.X_OK):
        raise LimbeckError(f'{option} "{path}" cannot be written: {home} lets you write nothing. Give another place.')


def check_file(path: Path, option: str) -> None:
    """Raise where the file that `option` names could not be written."""
    if path.is_dir():
        raise LimbeckError(f'{option} "{path}" is a folder. Name a file in it.')
    check_place(path, option)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, lambda place: place.write_text(text, encoding="utf8"))


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make a file under another name, which nobody else has, then put it in place."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")  # a process's number may be another machine's too
    temporary.touch()
    mode = temporary.stat().st_mode
    try:
        write(temporary)
        _settle(temporary, mode)
    except BaseException:
        temporary.unlink()  # it may have filled the disk
        raise
    temporary.replace(path)


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a folder under another name, then put it in place of the old one, if there is one."""
    temporary, old = path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.old")
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    for file in temporary.rglob("*"):
        if file.is_file():
            _settle(file, temporary.stat().st_mode & 0o666)
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _settle(path: Path, mode: int) -> None:
    """Have a file reach the disk, with the rights the user's umask gives: safetensors lets its owner alone read it."""
    path.chmod(mode)
    with path.open("rb") as file:
        os.fsync(file.fileno())
