"""How a corpus takes on a model's label order."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from limbeck.data.corpus import Corpus, RunningText, Split
from limbeck.data.kinds import KINDS, Kind
from limbeck.data.labels import keys
from limbeck.errors import LimbeckError


def is_generic(id2label: Mapping[int, str]) -> bool:
    """Whether a model's label names say nothing (LABEL_0, LABEL_1, …)."""
    return all(re.fullmatch(r"LABEL_\d+", name) for name in id2label.values())


def align(corpus: Corpus, id2label: Mapping[int, str], owner: str) -> tuple[Corpus, str]:
    """The corpus with class ids in the model's order, and a line that says what was done.

    Names are compared without case, hyphens, underscores and spaces, and never guessed: other names are an error. A
    model whose names are only LABEL_0… is taken to have the data's order. `Task.labels` keep the data's spelling. A
    corpus without labels takes the model's names.
    """
    data, task = corpus.task.labels, corpus.task
    kind = KINDS[task.kind]
    if not kind.named:
        return corpus, f"{task.name} predicts {kind.predicts}: there are no label names to align with {owner}"
    model = tuple(name for _, name in sorted((int(index), name) for index, name in id2label.items()))
    if not data:
        return replace(corpus, task=replace(task, labels=model)), f"labels are taken from {owner}: {_shown(model)}"
    if len(data) != len(model):
        raise _mismatch(corpus, model, owner)
    if is_generic(id2label):
        return corpus, f"{owner} names its labels only LABEL_0…: mapped by index, {_shown(data)}"
    wanted = {key: index for index, key in enumerate(keys(model, model))}
    if set(wanted) != set(keys(data, model)):
        raise _mismatch(corpus, model, owner)
    moved = np.array([wanted[key] for key in keys(data, model)], dtype=np.int64)
    labels = tuple(data[place] for place in np.argsort(moved))
    if labels == data:
        return corpus, f"labels are in the order of {owner}: {_shown(labels)}"
    aligned = replace(
        corpus,
        task=replace(task, labels=labels),
        train=_moved(corpus.train, kind, moved) if corpus.train is not None else None,
        evals={name: _moved(split, kind, moved) for name, split in corpus.evals.items()},
    )
    return aligned, f"labels were put in the order of {owner}: {_shown(labels)}"


def _moved(split: Split | RunningText, kind: Kind, moved: np.ndarray) -> Split | RunningText:
    return (
        split
        if isinstance(split, RunningText) or split.labels is None
        else replace(split, labels=kind.moved(split.labels, moved))
    )


def _mismatch(corpus: Corpus, model: Sequence[str], owner: str) -> LimbeckError:
    data = corpus.task.labels
    if len(data) <= len(model):  # the data may lack a class
        advice = (
            "If the data's labels mean these classes, in the data's own order, say so with --labels "
            f"{','.join(model)}; otherwise rename them in the file or give another model."
        )
    else:
        advice = f"There are {len(data)} against {len(model)}: is this the right label column, and are its rows clean?"
    return LimbeckError(
        f"the labels of the data and of {owner} differ: {corpus.task.name} has {_shown(data)}; {owner} has "
        f"{_shown(model)}. {advice}"
    )


def _shown(names: Sequence[str], most: int = 8) -> str:
    more = f", … ({len(names)} in all)" if len(names) > most else ""
    return ", ".join(f"{index} = {name}" for index, name in enumerate(names[:most])) + more
