"""How what the user named becomes a corpus."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from limbeck.data.columns import Columns, Rows, Table, choose, extract, is_number
from limbeck.data.corpus import Corpus, RunningText, Split
from limbeck.data.files import SUFFIXES, read
from limbeck.data.glue import read_task, split_files
from limbeck.data.hub import is_id, read_dataset
from limbeck.data.kinds import KINDS, Kind, find_kind
from limbeck.data.labels import kind_of
from limbeck.data.packing import find_files
from limbeck.data.spec import DataSpec
from limbeck.data.tasks import GLUE, Task, find_task, plain
from limbeck.errors import LimbeckError


def load(spec: DataSpec, *, train: bool = True, labelled: bool = True) -> Corpus:
    """Read the data a user named.

    `train=False` reads only what is evaluated on. With `labelled=False` files need no label column, and a corpus in
    which none has one has a task without labels and metrics. Where no eval file is given, a tenth of the train file is
    held out: the same tenth every time, and no text on both sides. Of running text it is the last hundredth.
    """
    named = find_task(spec.task) if spec.task is not None else None
    if spec.kind is not None and find_kind(spec.kind).packed:
        return _running(spec, find_kind(spec.kind), train)
    tables = _tables(spec, named, train)
    kind = _kind(spec, named, tables)
    rows, notes = _rows(tables, spec, named, labelled, kind)
    task, allowed_by = _task(spec, named, rows, kind)
    if named is None and spec.labels is None:
        _check_numbers(rows, task)
    splits = {name: _split(name, part, task, allowed_by) for name, part in rows.items()}
    trained = splits.pop("train", None)
    if trained is not None:
        _check_classes(trained, task, rows["train"].origin)
    if trained is not None and "dev" not in splits:
        trained, held = _hold_out(trained, KINDS[task.kind])
        splits = {"dev": held, **splits}
        notes.append(f"dev: {len(held)} examples held out of {rows['train'].origin}, since no eval file was given")
    elif trained is not None:
        notes += _seen(trained, splits)
    return Corpus(task, trained, splits, (*notes, _told(task)))


def _seen(trained: Split, evals: dict[str, Split]) -> list[str]:
    """A line for every split of which 2 % or more is trained on; of CoLA's it is 1.5 %, and nobody's mistake."""
    known, lines = {*trained.joined}, []
    for name, split in evals.items():
        seen = sum(text in known for text in split.joined)
        if seen >= 0.02 * len(split):
            lines.append(f"{name}: {seen} of its {len(split)} texts are trained on too, so that its scores flatter")
    return lines


def _running(spec: DataSpec, kind: Kind, train: bool) -> Corpus:
    """Running text, for a kind that learns from it."""
    for option in ("task", "data", "label", "labels", "text_pair", "few", "label_noise"):
        if getattr(spec, option) is not None:
            raise LimbeckError(
                f"--{option.replace('_', '-')} does not go with --kind {kind.name}, which reads running text: it is "
                "given with --train and --eval, and has neither labels nor examples of its own."
            )
    named = {"train": spec.train if train else None, "dev": spec.eval, "test": spec.test}
    texts = {split: RunningText(split, find_files(name), spec.text or "text") for split, name in named.items() if name}
    if not texts or (train and "train" not in texts):
        raise LimbeckError(f"--kind {kind.name} reads running text: give it with {'--train' if train else '--eval'}.")
    notes = [f"{split}: running text, {_counted(text.files)}" for split, text in texts.items()]
    trained = texts.pop("train", None)
    if trained is not None and "dev" not in texts:
        texts = {"dev": replace(trained, name="dev", held=True), **texts}
        trained = replace(trained, held=False)
        notes.append("dev: the last hundredth of it, since no eval file was given")
    task = Task(
        _stem(Path(spec.train or next(iter(texts.values())).files[0])), kind.name, (), kind.usual_metrics((), ())
    )
    return Corpus(task, trained, texts, tuple(notes))


def _counted(files: tuple[Path, ...]) -> str:
    size = sum(path.stat().st_size for path in files) / 2**20
    return f"{size:.1f} MiB in " + (str(files[0]) if len(files) == 1 else f"{len(files)} files")


def load_inputs(name: str, beside: DataSpec, kind: Kind = KINDS["classification"]) -> tuple[Split, list[str]]:
    """The train texts of another task or file for models of a `kind`, and lines that say what was read.

    A task lies where the run's own data lie. Labels are left out, but a decoder reads the texts to be written: these
    have to be there, in columns called as the run's own.
    """
    if Path(name).suffix.lower() in SUFFIXES:
        own = {"kind": kind.name, "text": beside.text, "label": beside.label} if kind.writes else {}
        spec, task = DataSpec(train=name, **own), None
    elif kind.writes:
        raise _nothing_written(name)
    elif plain(name) not in GLUE and (Path(name).exists() or Path(name).suffix or Path(name).name != name):
        raise LimbeckError(f'the supplement "{name}" is neither a task nor a file of {", ".join(SUFFIXES)}.')
    else:
        spec, task = DataSpec(task=name, data=beside.data), find_task(name)
        if beside.data is None:
            raise LimbeckError(
                f'"{name}" is a task, and there is no --data to look for it in. Give --data FOLDER_OR_ID, or a file.'
            )
    tables = {"train": _tables(spec, task, True)["train"]}
    rows, notes = _rows(tables, spec, task, False, _kind(spec, task, tables))
    found = rows["train"]
    if kind.writes and found.values is None:
        raise _nothing_written(name)
    written = kind.labels(found.values or (), (), origin=found.origin, allowed_by="") if kind.writes else None
    return Split("train", found.text, found.text_pair, written), notes


def _nothing_written(name: str) -> LimbeckError:
    return LimbeckError(
        f"{name} has no texts to be written, and a decoder reads them. As other data give a file with both texts, in "
        "the columns source and target, or called as in --train."
    )


def _tables(spec: DataSpec, task: Task | None, train: bool) -> dict[str, Table]:
    files = {"train": spec.train if train else None, "dev": spec.eval, "test": spec.test}
    files = {split: Path(path) for split, path in files.items() if path is not None}
    if files and spec.data is not None:
        raise LimbeckError(
            f"both --data {spec.data} and files of your own ({', '.join(map(str, files.values()))}) are given. Give "
            "one: --data FOLDER_OR_ID, or --train FILE --eval FILE."
        )
    if spec.data is not None:
        where = Path(spec.data)
        if where.is_file():
            raise LimbeckError(
                f"--data {where} is a file; --data takes a folder or a dataset id. Type --train {where}."
            )
        if not where.is_dir():
            return _from_hub(spec.data, task, train)
        if task is not None:
            return read_task(where, task, train=train)
        files = {split: path for split, path in split_files(where).items() if train or split != "train"}
    if not files or (train and "train" not in files):
        raise LimbeckError(_nothing_to_read(spec, train))
    for path in files.values():
        if path.suffix.lower() == ".txt":
            known = ", ".join(kind.name for kind in KINDS.values() if kind.packed)
            raise LimbeckError(f"{path} is running text. Say with --kind what is learnt from it: {known}.")
    return {split: Table(str(path), read(path)) for split, path in files.items()}


def _from_hub(name: str, task: Task | None, train: bool) -> dict[str, Table]:
    if not is_id(name):
        raise LimbeckError(f"there is no folder {name}. Check the path, or give a dataset id such as nyu-mll/glue.")
    return read_dataset(name, task, train=train)


def _nothing_to_read(spec: DataSpec, train: bool) -> str:
    if spec.data is not None:
        return (
            f"{spec.data} holds no {'train' if train else 'dev'} file (.tsv, .jsonl, .csv or .parquet). For a GLUE "
            "task add --task NAME; otherwise name the files with --train FILE --eval FILE."
        )
    if spec.task is not None:
        return (
            f"--task {spec.task} is given without its data. Add --data FOLDER (the GLUE download), --data nyu-mll/glue "
            "or --train FILE --eval FILE."
        )
    if train:
        return "there is nothing to train on. Give --task NAME --data FOLDER_OR_ID, or --train FILE [--eval FILE]."
    return "there is nothing to evaluate on. Give --task NAME --data FOLDER_OR_ID, or --eval FILE."


def _kind(spec: DataSpec, task: Task | None, tables: dict[str, Table]) -> Kind | None:
    """The kind of the task, where it shows before labels are looked at."""
    if task is not None and spec.kind not in (None, task.kind):
        raise LimbeckError(f"--kind {spec.kind} is given, and {task.name} is a {task.kind} task. Leave --kind out.")
    if task is not None or spec.kind is not None:
        return find_kind(task.kind if task else str(spec.kind))
    first = next(iter(tables.values()))
    return next((kind for kind in KINDS.values() if kind.recognised(first)), None)


def _rows(
    tables: dict[str, Table], spec: DataSpec, task: Task | None, labelled: bool, kind: Kind | None
) -> tuple[dict[str, Rows], list[str]]:
    rows: dict[str, Rows] = {}
    notes: list[str] = []
    usual: list[Columns] = [columns for columns in (task.official, task.hub) if columns] if task else []
    usual += kind.columns if kind else ()
    pairs: bool | None = None
    for split, table in tables.items():
        columns, guessed = choose(table, spec, usual)
        if kind and not kind.labelled:
            columns = columns._replace(label=None)
        elif columns.label is None and labelled:
            raise LimbeckError(
                f"no column of {table.origin} looks like a label; its columns are {', '.join(table.columns)}. Name "
                "it with --label COLUMN."
            )
        if pairs is not None and pairs != (columns.text_pair is not None):
            raise LimbeckError(
                f"{table.origin} has {'single texts' if pairs else 'pairs of texts'}, unlike the files before it. Name "
                "the columns with --text and --text-pair; all files need the same kind."
            )
        pairs = columns.text_pair is not None
        usual = [columns, *usual]
        part = extract(kind.tidied(table, columns) if kind else table, columns)
        rows[split] = part
        chosen = ", ".join(f"{role} = {name}" for role, name in columns._asdict().items() if name is not None)
        notes.append(
            f"{split}: {len(part.text)} examples of {table.origin} ({chosen}{'; guessed by name' if guessed else ''})"
        )
        notes += [f"{split}: {remark}" for remark in (kind.remarks(part) if kind else ())]
        if part.skipped:
            notes.append(f"{split}: {part.skipped} rows with missing fields skipped")
    return rows, notes


def _task(spec: DataSpec, named: Task | None, rows: dict[str, Rows], kind: Kind | None) -> tuple[Task, str]:
    """The task, and whose labels it has: for the message when a row has another."""
    if spec.labels is not None:
        _check_names(spec.labels, kind, named.name if named else "this kind")
    if named is not None:
        if spec.labels is None:
            return named, f"the task {named.name}"
        return replace(named, labels=spec.labels), "--labels"
    first = next(iter(rows))
    stem = Path(spec.data).name if spec.data else _stem(Path(rows[first].origin))
    lead = next((split for split, part in rows.items() if part.values is not None), None)
    values, origin = (rows[lead].values or [], rows[lead].origin) if lead else ([], "nothing")
    declared = rows[lead].classes if lead else None
    if kind is None:
        kind = KINDS[kind_of(values)]
        if kind.regression and (declared or spec.labels or lead is None):
            kind = KINDS["classification"]
    all_values = [value for part in rows.values() for value in part.values or ()]
    if spec.labels is not None:
        return _own_task(stem, kind, spec.labels, all_values), "--labels"
    if lead is None:
        return Task(stem, kind.name, (), () if kind.labelled else kind.usual_metrics((), ())), "nothing"
    return _own_task(stem, kind, declared or kind.names(values), all_values), origin


def _stem(file: Path) -> str:
    """What a file's data are called: by the file, or by its folder where the file's name says nothing."""
    return file.absolute().parent.name or file.stem if file.stem in ("train", "training", "data") else file.stem


def _check_names(labels: tuple[str, ...], kind: Kind | None, name: str) -> None:
    if kind is not None and not kind.named:
        raise LimbeckError(
            f"--labels is given, but {name} predicts {kind.predicts} and has no labels. Leave --labels out."
        )
    if len(set(labels)) < max(2, len(labels)):
        raise LimbeckError(
            f"--labels {','.join(labels)} must name at least two labels, each once. Type for instance --labels no,yes."
        )


def _own_task(name: str, kind: Kind, labels: tuple[str, ...], values: list) -> Task:
    return Task(name, kind.name, labels, kind.usual_metrics(labels, values))


def _check_numbers(rows: dict[str, Rows], task: Task) -> None:
    """Numbers name words where somebody says in which order; where these are but words of another file, nobody does."""
    if task.kind != "classification" or any(part.classes for part in rows.values()):
        return
    for part in rows.values():
        if part.values and all(map(is_number, part.values)) and not any(map(is_number, task.labels)):
            raise LimbeckError(
                f"the labels of {part.origin} are numbers, those of the files before it words "
                f"({', '.join(task.labels)}): which number is which? Name the words in the order of the numbers, from "
                "0 on, with --labels, or write the same labels in all files."
            )


def _split(name: str, rows: Rows, task: Task, allowed_by: str) -> Split:
    labels = None
    if rows.values is not None:
        labels = KINDS[task.kind].labels(rows.values, task.labels, origin=rows.origin, allowed_by=allowed_by)
    return Split(name, rows.text, rows.text_pair, labels)


def _hold_out(split: Split, kind: Kind) -> tuple[Split, Split]:
    """Train and dev. By the hash of the texts, so that the choice needs no seed and equal texts stay together."""
    hashes = np.array([hashlib.sha1(text.encode()).hexdigest() for text in kind.kept_together(split)])
    distinct = np.unique(hashes)
    if len(distinct) < 2:
        raise LimbeckError(
            "the train file has too few different texts to hold some out. Give an eval file with --eval FILE."
        )
    held = hashes < distinct[max(1, len(distinct) // 10)]
    return split.at(np.flatnonzero(~held)), replace(split.at(np.flatnonzero(held)), name="dev")


def _check_classes(train: Split, task: Task, origin: str) -> None:
    if train.labels is None or task.kind != "classification":
        return
    present = np.unique(train.labels)
    if len(present) < 2:
        raise LimbeckError(
            f'every example of {origin} has the label "{task.labels[present[0]]}": there is nothing to learn. Give a '
            "train file with at least two labels, or name another column with --label."
        )


def _told(task: Task) -> str:
    kind = KINDS[task.kind]
    if not kind.named:
        return f"{task.name}: {kind.predicts} is predicted ({', '.join(task.metrics)})"
    if not task.labels:
        return f"{task.name}: no labels"
    shown = ", ".join(task.labels[:20]) + ("…" if len(task.labels) > 20 else "")
    return f"{task.name}: {len(task.labels)} {kind.classes}, {shown}"
