"""Which tasks have a name, and what their labels, metrics and columns are."""

from dataclasses import dataclass
from typing import NamedTuple

from limbeck.errors import LimbeckError, did_you_mean


class Columns(NamedTuple):
    """Where a table keeps its text, the second text of a pair, and the label."""

    text: str
    text_pair: str | None
    label: str | None


@dataclass(frozen=True)
class Task:
    """What is predicted and how it is scored. `labels` are in index order; a regression task has none.

    `metrics` name the main one first. The rest says where GLUE's files keep a task and is empty for files of one's own.
    """

    name: str
    kind: str  # one of data/kinds
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    folder: str = ""
    official: Columns | None = None
    hub: Columns | None = None
    header: tuple[str, ...] | None = None  # for official files that have no header line
    ragged: bool = False  # official files with broken lines, which every reader of GLUE skips
    evals: tuple[tuple[str, str], ...] = (("dev", ""),)  # our split name, suffix of the file's or hub's split name


_SENTENCES = Columns("sentence1", "sentence2", "label")

_TASKS = (
    Task(
        name="cola",
        kind="classification",
        labels=("unacceptable", "acceptable"),
        metrics=("matthews", "accuracy"),
        folder="CoLA",
        official=Columns("sentence", None, "label"),
        hub=Columns("sentence", None, "label"),
        header=("source", "label", "mark", "sentence"),
    ),
    Task(
        name="sst2",
        kind="classification",
        labels=("negative", "positive"),
        metrics=("accuracy",),
        folder="SST-2",
        official=Columns("sentence", None, "label"),
        hub=Columns("sentence", None, "label"),
    ),
    Task(
        name="mrpc",
        kind="classification",
        labels=("not_equivalent", "equivalent"),
        metrics=("accuracy", "f1"),
        folder="MRPC",
        official=Columns("#1 String", "#2 String", "Quality"),
        hub=_SENTENCES,
    ),
    Task(
        name="stsb",
        kind="regression",
        labels=(),
        metrics=("spearman", "pearson"),
        folder="STS-B",
        official=Columns("sentence1", "sentence2", "score"),
        hub=_SENTENCES,
    ),
    Task(
        name="qqp",
        kind="classification",
        labels=("not_duplicate", "duplicate"),
        metrics=("accuracy", "f1"),
        folder="QQP",
        official=Columns("question1", "question2", "is_duplicate"),
        hub=Columns("question1", "question2", "label"),
        ragged=True,
    ),
    Task(
        name="mnli",
        kind="classification",
        labels=("entailment", "neutral", "contradiction"),
        metrics=("accuracy",),
        folder="MNLI",
        official=Columns("sentence1", "sentence2", "gold_label"),
        hub=Columns("premise", "hypothesis", "label"),
        ragged=True,
        evals=(("dev", "_matched"), ("dev_mismatched", "_mismatched")),
    ),
    Task(
        name="qnli",
        kind="classification",
        labels=("entailment", "not_entailment"),
        metrics=("accuracy",),
        folder="QNLI",
        official=Columns("question", "sentence", "label"),
        hub=Columns("question", "sentence", "label"),
    ),
    Task(
        name="rte",
        kind="classification",
        labels=("entailment", "not_entailment"),
        metrics=("accuracy",),
        folder="RTE",
        official=_SENTENCES,
        hub=_SENTENCES,
    ),
    Task(
        name="wnli",
        kind="classification",
        labels=("not_entailment", "entailment"),
        metrics=("accuracy",),
        folder="WNLI",
        official=_SENTENCES,
        hub=_SENTENCES,
    ),
)

GLUE: dict[str, Task] = {task.name: task for task in _TASKS}


def plain(name: str) -> str:
    """A name as it is compared: `SST-2`, `sst_2` and `sst2` are one."""
    return "".join(letter for letter in name.lower() if letter not in "-_ ")


def find_task(name: str) -> Task:
    """The GLUE task of that name, however it is spelled."""
    task = GLUE.get(plain(name))
    if task is None:
        raise LimbeckError(
            f'there is no task "{name}"; the tasks are {", ".join(GLUE)}.{did_you_mean(plain(name), GLUE)} '
            "For data of your own leave --task out and give --train FILE --eval FILE."
        )
    return task
