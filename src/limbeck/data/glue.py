"""Where a folder keeps the files of a task, in GLUE's official layout or the hub's."""

from pathlib import Path

from limbeck.data.columns import Table
from limbeck.data.files import SUFFIXES, read
from limbeck.data.tasks import Task, plain
from limbeck.errors import LimbeckError

_DEV_STEMS = ("dev", "validation")


def read_task(folder: Path, task: Task, *, train: bool) -> dict[str, Table]:
    """The train (if wanted) and dev tables of a task, by split name."""
    home = _task_folder(folder, task)
    tables = {"train": _read(_find(home, ("train",)), task)} if train else {}
    for place, (split, suffix) in enumerate(task.evals):
        stems = [stem + suffix for stem in _DEV_STEMS]
        # Selections are made on the first; a further dev set is a bonus.
        path = _find(home, stems) if place == 0 else _first(home, stems)
        if path is not None:
            tables[split] = _read(path, task)
    return tables


def split_files(folder: Path) -> dict[str, Path]:
    """The files named after splits in a folder of one's own data."""
    stems = {"train": ("train",), "dev": _DEV_STEMS, "test": ("test",)}
    found = {split: _first(folder, names) for split, names in stems.items()}
    return {split: path for split, path in found.items() if path is not None}


def _task_folder(folder: Path, task: Task) -> Path:
    inside = [sub for sub in sorted(folder.iterdir()) if sub.is_dir() and plain(sub.name) == plain(task.folder)]
    return inside[0] if inside else folder


def _first(folder: Path, stems: tuple[str, ...] | list[str]) -> Path | None:
    paths = (folder / f"{stem}{suffix}" for suffix in SUFFIXES for stem in stems)
    return next((path for path in paths if path.is_file()), None)


def _find(home: Path, stems: tuple[str, ...] | list[str]) -> Path:
    path = _first(home, stems)
    if path is None:
        there = ", ".join(sorted(sub.name for sub in home.iterdir())[:12]) or "nothing"
        raise LimbeckError(
            f"there is no {stems[0]}.tsv (nor .jsonl, .csv or .parquet) in {home}, which holds {there}. Give --data "
            "the folder of the GLUE download or of the task, or name the files with --train FILE --eval FILE."
        )
    return path


def _read(path: Path, task: Task) -> Table:
    official = path.suffix.lower() == ".tsv"
    ragged = official and task.ragged
    columns = read(path, header=task.header if official else None, blank_ragged=ragged)
    return Table(str(path), columns, ragged=ragged)
