"""Models side by side: every metric, size, latency, and agreement with the first of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from transformers import PreTrainedModel

from limbeck import architectures, efficiency, evaluation, models
from limbeck.data.corpus import Corpus
from limbeck.data.encoding import Encoded, cut, encode
from limbeck.data.kinds import KINDS
from limbeck.data.label_order import align
from limbeck.data.loading import load
from limbeck.data.spec import DataSpec
from limbeck.data.tasks import Task
from limbeck.errors import LimbeckError
from limbeck.folder import check_file, write_text
from limbeck.report.tables import count


def compare(
    names: list[str], data: DataSpec, predictions: Path | None = None, say: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """A row a model: scores of every split, size, milliseconds a forward (taken in turns), agreement with the first.
    What was read, and how, is said."""
    if predictions:
        check_file(predictions, "--predictions")
    data = models.with_kind(data, names[0])
    corpus = load(data, train=False)
    kind = KINDS[corpus.task.kind]
    if kind.bare:
        raise LimbeckError(
            "models without a head predict nothing that could be scored. Fine-tune them on a task, then evaluate."
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = {name: models.load_model(name).to(device) for name in names}  # type: ignore[arg-type]
    read, notes = {}, list(corpus.notes)
    for name, model in loaded.items():
        task, splits, said = _read(name, model, corpus, data)
        if kind.vocabulary and name != names[0]:
            models.check_vocabulary(models.load_tokenizer(names[0]), name, model.config)
        read[name] = task, splits
        notes += said
    for note in dict.fromkeys(notes):  # all of it, once nothing can be wrong any more
        say(note)
    rows, answers, batches = [], [], {}
    first: dict[str, Any] = {}  # what the first model answers, by split
    for name, model in loaded.items():
        task, splits = read[name]
        row: dict[str, Any] = {"model": name, "scores": {}, "agreement": {}}
        for split, encoded in splits.items():
            logits, right = evaluation.predict(model, encoded), encoded.right
            row["scores"][split] = evaluation.measure(task, logits, right)
            decided = kind.decided(kind.ordered(logits, task.labels), sorted(task.labels), right)
            row["agreement"][split] = 100 * kind.agreement(decided, first.setdefault(split, decided))
            answers += [
                {"model": name, "split": split, "index": i, **answer}
                for i, answer in enumerate(kind.answers(logits, task.labels, right))
            ]
        batches[name] = efficiency.typical_batch(next(iter(splits.values())))
        row["parameters"] = efficiency.parameters(model)
        row["gflops"] = efficiency.flops(model, batches[name]) / 1e9
        rows.append(row)
    for row, ms in zip(rows, efficiency.latency(loaded, batches).values()):
        row["latency_ms"] = ms
        row["speedup"] = rows[0]["latency_ms"] / ms
    if predictions:
        write_text(predictions, "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers))
    return rows


def _read(
    name: str, model: PreTrainedModel, corpus: Corpus, data: DataSpec
) -> tuple[Task, dict[str, Encoded], list[str]]:
    """The task with labels in the model's order, the tokens that the model reads of every split, and what to say."""
    models.check_kind(model, corpus.task, name)
    tokenizer = models.load_tokenizer(name)
    models.adopt_padding(model, tokenizer)
    aligned, said = align(corpus, dict(enumerate(models.label_names(model))), name)
    kind, columns = KINDS[aligned.task.kind], architectures.inputs(model)
    wanted = kind.length if data.max_length is None else data.max_length
    longest, most = (models.longest_input(model.config, tokenizer, n) for n in (wanted, models.MOST))
    splits = {
        split: encode(examples, tokenizer, columns, longest, kind, stride=data.stride)
        for split, examples in aligned.evals.items()
    }
    notes = [] if kind.packed else [said]
    for split, examples in aligned.evals.items():
        notes += cut(examples, splits[split], longest, most)
    return aligned.task, splits, notes


def shown(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table; a model is named by as much of its path as tells it from the others."""
    metrics = [(split, metric) for split, found in rows[0]["scores"].items() for metric in found]
    several = len(rows[0]["scores"]) > 1
    caption = "GFLOPs, ms: one example; agreement, speed-up: with the first model"
    table = Table(caption=caption if len(rows) > 1 else None, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("model", no_wrap=True)
    for split, metric in metrics:  # a heading may be folded, a number not
        widest = max(len(f"{row['scores'][split][metric]:.2f}") for row in rows)
        heading = f"{split} {metric}" if several else metric
        table.add_column(heading, justify="right", min_width=widest, overflow="fold")
    for heading in ("params", "GFLOPs", "ms", "speed-up", "agree"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in zip(_short([row["model"] for row in rows]), rows):
        table.add_row(
            name,
            *(f"{row['scores'][split][metric]:.2f}" for split, metric in metrics),
            count(row["parameters"]),
            f"{row['gflops']:.2f}",
            f"{row['latency_ms']:.1f}",
            f"{row['speedup']:.2f}×",
            f"{next(iter(row['agreement'].values())):.1f}",
        )
    return table


def _short(names: list[str]) -> list[str]:
    """The shortest ends of the paths that differ."""
    parts = [Path(name).parts for name in names]
    for length in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(part[-length:]) for part in parts]
        if len(set(ends)) == len(set(names)):
            return ends
    return names
