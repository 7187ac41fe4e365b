"""How the student starts: layers of a model, a checkpoint, a reused classifier, or at random."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from limbeck import architectures, projector
from limbeck.data.kinds import of
from limbeck.errors import LimbeckError
from limbeck.mappings import MAPPINGS
from limbeck.spec import bind, parse


@dataclass
class Start:
    """A student in the making: what it is built from, and a line for each thing done to it."""

    student: PreTrainedModel
    source: PreTrainedModel  # the checkpoint given as --student, or the teacher
    teacher: PreTrainedModel | None
    from_teacher: bool
    fresh_classifier: bool = True
    frozen: set[str] = field(default_factory=set)  # parameters that never train
    notes: list[str] = field(default_factory=list)


def layers(start: Start, *, which: str | list[int] = "first") -> None:
    """Embeddings and some layers of the source: `first`, `top`, `uniform`, `sanh`, or a list such as [4, 8, 12]."""
    depth, available = _depths(start)
    if isinstance(which, str):
        found = bind(parse(which), MAPPINGS, "choice of layers")(depth, available)
        if found.draw or found.groups:
            raise LimbeckError(
                f"layers({which}): a student starts once, so its layers cannot be drawn at random, nor come in groups."
            )
        start.notes += [found.note] if found.note else []
        chosen = found.teacher
    else:
        chosen = tuple(which)
    if len(chosen) != depth or not all(1 <= layer <= available for layer in chosen):
        raise LimbeckError(
            f"layers({list(chosen)}) names {len(chosen)} layers for a student of {depth}; each must be one of 1 to "
            f"{available}. Set --layers {len(chosen)}, or name {depth}."
        )
    _copy(start, chosen, with_head=False)
    whose = "the teacher" if start.from_teacher else "the checkpoint"
    start.notes.append(f"layers 1 to {depth} start as layers {', '.join(map(str, chosen))} of {whose}")


def checkpoint(start: Start) -> None:
    """All of the checkpoint given as --student, classifier included; without one, the teacher's lower layers."""
    if start.from_teacher:
        return layers(start)
    depth, _ = _depths(start)
    _copy(start, tuple(range(1, depth + 1)), with_head=True)
    start.fresh_classifier = False
    start.notes.append(f"starts as the checkpoint's first {depth} layers and its classifier, if it has one")


def classifier(start: Start, *, frozen: bool = False, project: bool = False) -> None:
    """The teacher's pooler and classifier, reused; `frozen` keeps them as they are. A student of another width gets a
    learnt linear map before them, with `project` one of the same width too."""
    student, teacher = start.student, start.teacher
    if teacher is None:
        raise LimbeckError("classifier reuses the teacher's classifier, and there is no teacher. Give --teacher.")
    ours, theirs = architectures.activation(student), architectures.activation(teacher)
    if ours != theirs:
        raise LimbeckError(
            f"the teacher's classifier ({teacher.config.model_type}) cannot be reused: there is a {theirs} between its "
            f"two linear maps, and a {ours} in a student of type {student.config.model_type}. Give a student whose "
            "classifier is of the same kind, or let it have its own: leave classifier out of init, as in "
            "--set init=[layers(first)]."
        )
    if student.config.num_labels != teacher.config.num_labels:
        raise LimbeckError(
            f"the teacher's classifier predicts {teacher.config.num_labels} labels and the student is to predict "
            f"{student.config.num_labels}: it does not fit. Give a teacher of this task."
        )
    reused = projector.take_over(student, teacher, project=project)
    start.fresh_classifier = False
    start.frozen |= reused if frozen else set()
    start.notes.append(f"pooler and classifier are the teacher's, {'frozen' if frozen else 'and train on'}")
    if added := architectures.projector(student):
        start.notes.append(
            f"a learnt map from width {added.in_features} to {added.out_features} feeds the reused classifier"
        )


def embeddings(start: Start, *, frozen: bool = False) -> None:
    """The teacher's embeddings, reused; `frozen` keeps them as they are."""
    if start.teacher is None:
        raise LimbeckError("embeddings reuses the teacher's embeddings, and there is no teacher. Give --teacher.")
    theirs = start.teacher.state_dict()
    prefix = f"{start.student.base_model_prefix}.{architectures.family(start.student).blocks}."
    beside = (prefix, *architectures.head(start.student))
    ours = {name: p for name, p in start.student.named_parameters() if not name.startswith(beside)}
    if any(name not in theirs or theirs[name].shape != parameter.shape for name, parameter in ours.items()):
        raise LimbeckError(
            f"the teacher's embeddings ({_said(start.teacher)}) do not fit the student ({_said(start.student)}). "
            "Reusing them needs one family and one width."
        )
    start.student.load_state_dict({name: theirs[name] for name in ours}, strict=False)
    start.frozen |= set(ours) if frozen else set()
    start.notes.append(f"embeddings are the teacher's, {'frozen' if frozen else 'and train on'}")


def random(start: Start) -> None:
    """Fresh weights throughout."""
    start.notes.append("embeddings and layers start at random")


INITIALISERS = {f.__name__: f for f in (layers, checkpoint, embeddings, classifier, random)}


def start_student(
    calls: Sequence[str],
    teacher: PreTrainedModel | None,
    source: PreTrainedModel,
    *,
    depth: int | None = None,
    width: int | None = None,
    labels: dict,
    seed: int,
) -> Start:
    """Build a student of `depth` layers (the source's, if not said) and start it as the recipe says."""
    config = _config(source, depth, width, labels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student = architectures.auto_class(of(source)).from_config(config, dtype=torch.float32)
        start = Start(student, source, teacher, from_teacher=source is teacher)
        for call in calls:
            bind(parse(call), INITIALISERS, "start")(start)
    if start.fresh_classifier:
        start.notes.append("pooler and classifier start afresh")
    return start


def _config(source: PreTrainedModel, depth: int | None, width: int | None, labels: dict) -> PretrainedConfig:
    config = copy.deepcopy(source.config)
    for name, value in labels.items():
        setattr(config, name, value)
    if depth is not None and depth < 1:
        raise LimbeckError(f"--layers {depth}: a student has at least one layer.")
    if depth is not None:
        config.num_hidden_layers = depth
    if width is not None and width != config.hidden_size:
        size = config.hidden_size // config.num_attention_heads
        if width % size:
            raise LimbeckError(f"--width {width} must be a multiple of the model's head size, {size}.")
        inner = "hidden_dim" if hasattr(config, "hidden_dim") else "intermediate_size"
        setattr(config, inner, getattr(config, inner) * width // config.hidden_size)
        config.num_attention_heads = width // size
        config.hidden_size = width
        if hasattr(config, "pooler_hidden_size"):  # DeBERTa's
            config.pooler_hidden_size = width
    return config


def _depths(start: Start) -> tuple[int, int]:
    depth, available = architectures.shape(start.student).layers, architectures.shape(start.source).layers
    if available < depth:
        raise LimbeckError(
            f"the student is to have {depth} layers and the model they come from has {available}. "
            f"Give --layers {available} or fewer."
        )
    return depth, available


def _copy(start: Start, chosen: Sequence[int], *, with_head: bool) -> None:
    """Copy the source's weights by name, student block i from the source's block `chosen[i]`."""
    student, source = start.student, start.source
    if student.config.hidden_size != source.config.hidden_size:
        raise LimbeckError(
            f"a student of width {student.config.hidden_size} cannot take layers of width {source.config.hidden_size}. "
            "Leave out --width, give a narrower checkpoint as --student, or start at random: in the recipe's init, "
            "random in place of layers or checkpoint (--set init=[random])."
        )
    prefix = f"{student.base_model_prefix}.{architectures.family(student).blocks}."
    head = tuple(architectures.head(student))
    theirs = source.state_dict()
    weights: dict[str, Tensor] = {}
    for name in student.state_dict():
        if name.startswith(prefix):
            block, _, rest = name.removeprefix(prefix).partition(".")
            weights[name] = theirs[f"{prefix}{chosen[int(block)] - 1}.{rest}"]
        elif (with_head and start.fresh_classifier) or not name.startswith(head):
            weights[name] = theirs[name]
    student.load_state_dict(weights, strict=False)


def _said(model: PreTrainedModel) -> str:
    return f"{model.config.model_type}, width {model.config.hidden_size}"
