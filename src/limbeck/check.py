"""What a run would do, from one tiny forward and backward: before hours are spent on it."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from limbeck import architectures, efficiency
from limbeck.cache import Choice, budget, choose
from limbeck.data.encoding import Encoded
from limbeck.data.plan import padded
from limbeck.distiller import Distiller
from limbeck.engine.progress import clock
from limbeck.objectives import Match, Objective, word_for
from limbeck.prepare import Prepared
from limbeck.taps import Site, Tap
from limbeck.teachers import PASSES, Live
from limbeck.trained import whole_modules

EXAMPLES = 8  # how many a timed step takes at most


@dataclass
class Term:
    """One objective, as bound to the models."""

    name: str
    what: str
    pairs: list[tuple[int, int]]  # student layer, teacher layer
    drawn: bool  # the pairs are one draw of many
    widths: tuple[int, int] | None
    aligner: str
    aligner_parameters: int
    weight: str
    value: float  # at the start, unweighted
    share: float  # of the weighted loss, at the weight the stage ends with


@dataclass
class StageReport:
    """One stage, examined."""

    name: str
    steps: int
    batch: int
    lr: float
    trains: int
    frozen: int
    frozen_modules: list[str]
    unreached: list[str]
    unreached_modules: list[str]
    student_sites: list[str]
    teacher_sites: list[str]
    teacher_blocks: tuple[int, int] | None  # run, of
    keeps: str
    terms: list[Term]
    memory_gib: float
    cache_gib: float  # of the teacher's answers; 0 where none are kept
    uncached: str  # why the teacher runs at every step beside a cache
    seconds: float


@dataclass
class Report:
    """All a user should know before the run."""

    recipe: str
    notes: list[str]
    task_values: dict[str, Any]
    variant_values: list[tuple[str, Any, Any]]  # path, was, is
    variant_tasks: list[str]  # for which the variant has values of its own
    student: dict[str, int]
    teacher: dict[str, int] | None
    stages: list[StageReport] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def examine(
    prepared: Prepared,
    task_values: dict[str, Any],
    variant_values: Sequence[tuple[str, Any, Any]] = (),
    variant_tasks: Sequence[str] = (),
) -> Report:
    """Run one small step of every stage and say what it showed; nothing is written and no weight moves."""
    report = Report(
        prepared.request.recipe.name,
        prepared.notes,
        task_values,
        list(variant_values),
        list(variant_tasks),
        _model(prepared.student),
        _model(prepared.teacher) if prepared.teacher is not None else None,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reached = [prepared.set_trained(index) for index in range(len(prepared.stages))]
    for index, unreached in enumerate(reached):
        prepared.set_trained(index)
        prepared.distillers[index].to(device)
        report.stages.append(_stage(prepared, index, unreached))
    return report


def _stage(prepared: Prepared, index: int, unreached: list[str]) -> StageReport:
    distiller, stage = prepared.distillers[index], prepared.stages[index]
    parameters = list(distiller.parameters())
    trains = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = [name for name, p in distiller.named_parameters() if not p.requires_grad]
    values = {name: float(part) for name, part in _probe(distiller, prepared.probe()).items()}
    live, data = distiller.teacher, prepared.data(index)
    passes = distiller.steps * stage.batch / len(data)
    device = next(distiller.parameters()).device
    room = budget(device, None)
    pays = distiller.steady and passes >= PASSES
    kept = choose(live.tap, data, precision(device), room) if live and pays else Choice({})
    seconds, saved = _timed_step(distiller, data, prepared.longest, stage.batch, [one.site for one in kept.places])
    answers = kept.size(data, "device", "host")
    everything = sum(p.numel() for p in parameters)
    teacher = efficiency.parameters(prepared.teacher) if prepared.teacher is not None else 0
    return StageReport(
        name=stage.name,
        steps=distiller.steps,
        batch=stage.batch,
        lr=stage.lr,
        trains=trains,
        frozen=everything - trains,
        frozen_modules=whole_modules(distiller, {n for n in frozen if n not in unreached}),
        unreached=unreached,
        unreached_modules=whole_modules(distiller, set(unreached)),
        student_sites=_sites(distiller.tap),
        teacher_sites=_sites(live.tap) if live else [],
        teacher_blocks=(live.tap.depth, architectures.shape(live.model).at(live.tap.side).layers) if live else None,
        keeps=prepared.keeps(index),
        terms=list(_terms(distiller, values, prepared)),
        # Weights of both, and for what trains its gradient and the optimiser's two moments.
        memory_gib=(4 * (everything + teacher + 3 * trains) + saved + answers) / 2**30,
        cache_gib=answers / 2**30,
        uncached=kept.why,
        seconds=seconds * distiller.steps,
    )


def precision(device: torch.device) -> torch.dtype:
    """What models run in there, and token states are cached in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _terms(distiller: Distiller, values: dict[str, float], prepared: Prepared) -> Iterator[Term]:
    end = {name: abs(o.schedule(1.0) * values[name]) for name, o in distiller.terms.items()}
    total = sum(end.values()) or 1.0
    student = architectures.shape(prepared.student)
    teacher = architectures.shape(prepared.teacher) if prepared.teacher is not None else None
    for name, objective in distiller.terms.items():
        matched = isinstance(objective, Match)
        width = objective.feature.width if matched else None
        other = teacher if "teacher" in objective.sides else student
        yield Term(
            name=name,
            what=_what(objective),
            pairs=objective.pairs() if matched else [],
            drawn=matched and objective.layers.draw is not None,
            widths=(student.size(width), other.size(width)) if width and other else None,
            aligner=str(objective.align) if matched else "",
            aligner_parameters=sum(p.numel() for p in objective.parameters()),
            weight=objective.weight,
            value=values[name],
            share=end[name] / total,
        )


def _what(objective: Objective) -> str:
    kind = word_for(objective)
    if not isinstance(objective, Match):
        return kind
    return str(objective.call) if "teacher" in objective.sides else f"{objective.call}, {kind}"


def _probe(distiller: Distiller, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    distiller.at(0, 0)
    if distiller.mixup:
        distiller.mixup.halve()  # a draw may leave examples as they are
    with torch.no_grad():
        return distiller.eval()(**_there(distiller, batch)).parts


def _there(distiller: Distiller, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    device = next(distiller.parameters()).device
    return {name: column.to(device) for name, column in batch.items()}


def _timed_step(distiller: Distiller, data: Encoded, longest: int, batch: int, kept: list[Site]) -> tuple[float, float]:
    """Seconds and saved bytes of a step, from a forward and backward of a few examples of middling length."""
    few = min(batch, EXAMPLES, len(data))
    middle = data.by_length[(len(data) - few) // 2 :][:few]
    shape = padded(data.lengths[middle], longest)
    examples = _there(distiller, data.batch(middle, shape))
    live = distiller.teacher if kept and isinstance(distiller.teacher, Live) else None
    known = live.only(kept).features(**examples) if live else {}
    rest = live.only(set(live.tap.sites) - set(kept)) if live else None
    seen: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in distiller.parameters()}
    seconds = 0.0
    for _ in range(2):  # the first warms up
        seen.clear()
        start = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            answers = known | rest.features(**examples) if rest else None
            loss = distiller.train()(teacher_features=answers, **examples).loss
        loss.backward()
        if loss.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        distiller.zero_grad(set_to_none=True)
    distiller.eval()
    saved = sum(size for place, size in seen.items() if place not in weights)
    return seconds * batch / few, saved * batch / few


def _sites(tap: Tap) -> list[str]:
    """`cls 2, 4`: each feature with its layers."""
    by_name: dict[str, list[int]] = {}
    for name, layer in tap.sites:
        by_name.setdefault(name, []).append(layer)
    return [name if layers == [-1] else f"{name} {', '.join(map(str, layers))}" for name, layers in by_name.items()]


def _model(model) -> dict[str, int]:
    sizes = architectures.shape(model)._asdict()
    if encoder := sizes.pop("encoder"):
        sizes["encoder_layers"] = encoder.layers
    known = {name: size for name, size in sizes.items() if size is not None}
    return {**known, "parameters": efficiency.parameters(model)}


def shown(report: Report) -> Group:
    """The report as a person reads it."""
    parts: list[Any] = [Text(note, style="dim") for note in report.notes]
    if report.task_values:
        values = ", ".join(f"{path} = {value}" for path, value in report.task_values.items())
        parts.append(Text(f"values of the recipe for this task: {values}"))
    if report.variant_values:
        parts.append(Text("the variant differs from the plain recipe:"))
        for path, *values in report.variant_values:
            was, now = ("nothing" if value is None else value for value in values)
            parts.append(Text(f"  {path}: {was} → {now}"))
    elif report.variant_tasks:
        tasks = ", ".join(report.variant_tasks)
        parts.append(Text(f"here the variant is the plain recipe: it has values of its own for {tasks}, with --task"))
    for who, model in (("teacher", report.teacher), ("student", report.student)):
        if model:
            parts.append(
                Text(
                    f"{who}: {_depth(model)}, width {model['width']}, {model['heads']} heads, "
                    f"{model['parameters'] / 1e6:.1f} M parameters"
                )
            )
    for stage in report.stages:
        parts += ["", _stage_table(stage), *_stage_lines(stage)]
    return Group(*parts)


def _depth(model: dict[str, int]) -> str:
    if "encoder_layers" in model:
        return f"{model['encoder_layers']} encoder and {model['layers']} decoder layers"
    return f"{model['layers']} layers"


def _stage_table(stage: StageReport) -> Table:
    table = Table(
        title=f"stage {stage.name}",
        title_justify="left",
        caption="layers: student ← teacher, 0 is the embeddings; value: at the start, unweighted",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("part", "compares", "layers", "widths", "aligner", "weight"):
        table.add_column(heading, overflow="fold")
    for heading in ("value", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    for term in stage.terms:
        pairs = ", ".join(_met(term.pairs))
        aligner = f"{term.aligner}\n{term.aligner_parameters:,} params" if term.aligner_parameters else "none"
        table.add_row(
            term.name,
            term.what,
            f"{pairs} (one draw)" if term.drawn else pairs,
            f"{term.widths[0]}, {term.widths[1]}" if term.widths else "",
            aligner if term.pairs else "",
            term.weight,
            f"{term.value:.3g}",
            f"{term.share:.1%}",
        )
    return table


def _met(pairs: list[tuple[int, int]]) -> Iterator[str]:
    """`1←2`, or `1←1–11` where a student layer meets several."""
    for s, group in groupby(pairs, key=lambda pair: pair[0]):
        layers = [t for _, t in group]
        whole = layers == list(range(layers[0], layers[-1] + 1)) and len(layers) > 1
        met = f"{layers[0]}–{layers[-1]}" if whole else "+".join(map(str, layers))
        yield "end" if s < 0 else f"{s}←{met}"


def _stage_lines(stage: StageReport) -> Iterator[str]:
    yield f"  trains {stage.trains:,} parameters; {stage.frozen:,} are frozen; keeps the {stage.keeps} student"
    if stage.frozen_modules:
        yield f"  frozen: {', '.join(stage.frozen_modules)}"
    if stage.unreached:
        yield f"  no objective reaches {', '.join(stage.unreached_modules)}: frozen"
    yield f"  reads of the student: {'; '.join(stage.student_sites) or 'nothing'}"
    if stage.teacher_blocks:
        run, of = stage.teacher_blocks
        yield f"  reads of the teacher: {'; '.join(stage.teacher_sites)} ({run} of {of} layers run)"
    if stage.uncached:
        yield f"  {stage.uncached}"
    timed = "less than" if torch.cuda.is_available() else "about"  # a run captures its steps there
    yield (
        f"  {stage.steps:,} steps of {stage.batch} examples at lr {stage.lr:g}: {timed} {clock(stage.seconds)} here, "
        f"about {_size(stage.memory_gib)}"
        + (f", {_size(stage.cache_gib)} of it the teacher's answers" if stage.cache_gib else "")
    )


def _size(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 1 else f"{math.ceil(1024 * gib)} MiB"
