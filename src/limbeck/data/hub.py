"""How a dataset of the Hugging Face hub becomes tables, or files of running text."""

import re
from collections.abc import Sequence
from typing import Any

from limbeck.data.columns import Table
from limbeck.data.tasks import Task
from limbeck.errors import LimbeckError

SCHEME = "hf://"
_FILES = re.compile(SCHEME + r"datasets/([^/]+/[^/]+)/(.+?)/?")
_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def is_id(name: str) -> bool:
    """Whether a name could be a dataset id: `owner/name` or `name`."""
    return _ID.fullmatch(name) is not None


def read_dataset(name: str, task: Task | None, *, train: bool) -> dict[str, Table]:
    """The tables of a dataset, by our split names; a GLUE task is the configuration of its name, without the test set.

    GLUE's public test sets have no labels.
    """
    splits = _download(name, task.name if task else None)
    wanted = {"train": ["train"]} if train else {}
    if task is not None:
        wanted |= {ours: [f"validation{suffix}", f"dev{suffix}"] for ours, suffix in task.evals}
    else:
        wanted |= {"dev": ["validation", "dev", "valid"], "test": ["test"]}
    tables = {}
    for ours, theirs in wanted.items():
        found = next((split for split in theirs if split in splits), None)
        if found is not None:
            table = _table(f"{name} ({found})", splits[found])
            if ours != "test" or _has_labels(table):
                tables[ours] = table
        elif task is not None or ours == "train":
            raise LimbeckError(
                f"the dataset {name} has no split {theirs[0]}; it has {', '.join(splits)}. Name another dataset with "
                "--data, or files with --train FILE --eval FILE."
            )
    return tables


def fetch_files(url: str) -> str:
    """Where on this machine files of a dataset are, or a pattern or folder of them; they are downloaded once."""
    from huggingface_hub import snapshot_download

    named = _FILES.fullmatch(url)
    if named is None:
        raise LimbeckError(
            f"{url} names no files of the hub. Say hf://datasets/OWNER/NAME/PATH, where PATH is a file, a folder or a "
            "pattern such as train-*.parquet."
        )
    dataset, path = named.groups()
    try:
        folder = snapshot_download(dataset, repo_type="dataset", allow_patterns=[path, f"{path}/*"])
    except Exception as error:
        raise LimbeckError(
            f"the Hugging Face hub gave no files {url}: {_reason(error)} Check the spelling and the network, or give "
            "files of this machine."
        ) from error
    return f"{folder}/{path}"


def _download(name: str, config: str | None) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, config)
    except Exception as error:
        configured = f" with the configuration {config}" if config else ""
        raise LimbeckError(
            f"there is no folder {name} here, and the Hugging Face hub gave no dataset {name}{configured}: "
            f"{_reason(error)} Check the spelling and the network, or give files with --train FILE --eval FILE."
        ) from error


def _reason(error: Exception) -> str:
    """In a line. The hub's client raises errors of half a dozen unrelated classes, some of the HTTP library's."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _has_labels(table: Table) -> bool:
    return all(any(value is not None for value in table.columns[name]) for name in table.classes)


def _table(origin: str, split: Any) -> Table:
    columns = {column: list(split[column]) for column in split.column_names}
    classes = {}
    for column, feature in split.features.items():
        # A list of labels, as of tags, has the names one level down.
        names = getattr(getattr(feature, "feature", feature), "names", None)
        if names:
            classes[column] = tuple(names)
            columns[column] = [_spelled(value, names) for value in columns[column]]
    return Table(origin, columns, classes)


def _spelled(value: Any, names: Sequence[str]) -> Any:
    """A label by its name, or a list of them; -1 is how the hub writes "no label"."""
    if isinstance(value, list):
        return [_spelled(one, names) for one in value]
    return names[value] if value is not None and value >= 0 else None
