"""How the student starts: layers of a model, a checkpoint, a reused classifier, or at random."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from limbeck import architectures, projector
from limbeck.architectures import Side
from limbeck.data import kinds
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
    """Embeddings and some layers of the source: `first`, `top`, `uniform`, `sanh`, or a list such as [4, 8, 12]. Of a
    source with an encoder and a decoder, such layers of both."""
    chosen = {}
    for side, (depth, available) in _depths(start).items():
        chosen[side], note = _choose(which, depth, available)
        start.notes += [note] if note else []
    _copy(start, chosen, with_head=False)
    whose = "the teacher" if start.from_teacher else "the checkpoint"
    for side, taken in chosen.items():
        where = f"{side} layers" if len(chosen) > 1 else "layers"
        start.notes.append(f"{where} 1 to {len(taken)} start as layers {', '.join(map(str, taken))} of {whose}")


def _choose(which: str | list[int], depth: int, available: int) -> tuple[tuple[int, ...], str]:
    """The layers named, and what is to be said about them."""
    chosen, note = which, ""
    if isinstance(which, str):
        found = bind(parse(which), MAPPINGS, "choice of layers")(depth, available)
        if found.draw or found.groups:
            raise LimbeckError(
                f"layers({which}): a student starts once, so its layers cannot be drawn at random, nor come in groups."
            )
        chosen, note = found.teacher, found.note
    if len(chosen) != depth or not all(1 <= int(layer) <= available for layer in chosen):
        raise LimbeckError(
            f"layers({list(chosen)}) names {len(chosen)} layers for a student of {depth}; each must be one of 1 to "
            f"{available}. Set --layers {len(chosen)}, or name {depth}."
        )
    return tuple(map(int, chosen)), note


def checkpoint(start: Start) -> None:
    """All of the checkpoint given as --student, classifier included; without one, the teacher's lower layers."""
    if start.from_teacher:
        return layers(start)
    depths = _depths(start)
    _copy(start, {side: range(1, depth + 1) for side, (depth, _) in depths.items()}, with_head=True)
    start.fresh_classifier = False
    said = " and ".join(str(depth) for depth, _ in depths.values())
    start.notes.append(f"starts as the checkpoint's first {said} layers")


def classifier(start: Start, *, frozen: bool = False, project: bool = False) -> None:
    """The teacher's pooler and classifier, reused; `frozen` keeps them as they are. A student of another width gets a
    learnt linear map before them, with `project` one of the same width too."""
    student, teacher = start.student, start.teacher
    if teacher is None:
        raise LimbeckError("classifier reuses the teacher's classifier, and there is no teacher. Give --teacher.")
    _check_same_form(student, teacher)
    if kinds.of(student).vocabulary:
        reused = _take_words(student, teacher, project)
    else:
        _check_width(student, teacher)
        reused = projector.take_over(student, teacher, project=project)
    start.fresh_classifier = False
    start.frozen |= reused if frozen else set()
    start.notes.append(f"pooler and classifier are the teacher's, {'frozen' if frozen else 'and train on'}")
    if added := architectures.projector(student):
        start.notes.append(
            f"a learnt map from width {added.in_features} to {added.out_features} feeds the reused classifier"
        )


def _check_same_form(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """A classifier can be reused where the student's own would compute the same function, for the same labels."""
    if not architectures.head(teacher):
        raise LimbeckError(
            "classifier reuses the teacher's classifier, and models of running text have none. Leave it out of init, "
            "as in --set init=[layers(first)]."
        )
    ours, theirs = architectures.classifier_form(student), architectures.classifier_form(teacher)
    if ours != theirs:
        raise LimbeckError(
            f"the teacher's classifier ({teacher.config.model_type}) cannot be reused: it is {theirs}, and that of a "
            f"student of type {student.config.model_type} is {ours}. Give a student whose classifier is of the same "
            "kind, or let it have its own: leave classifier out of init, as in --set init=[layers(first)]."
        )
    if student.config.num_labels != teacher.config.num_labels:
        raise LimbeckError(
            f"the teacher's classifier predicts {teacher.config.num_labels} labels and the student is to predict "
            f"{student.config.num_labels}: it does not fit. Give a teacher of this task."
        )


def _check_width(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """A head of two maps stays as wide as it was: under a student of another width, only some classes have that."""
    form = architectures.classifier_form(teacher)
    if student.config.hidden_size == teacher.config.hidden_size or form == architectures.ONE_MAP:
        return
    if kinds.of(student).per_token:
        raise LimbeckError(
            f"the teacher's head is {form}, over every token: under a narrower student it would be wider than any "
            "model of transformers has it. Give a student of the teacher's width, or leave classifier out of init."
        )
    if not architectures.has_wide_head(student.config):
        raise LimbeckError(
            f"the teacher's head is wider than the states of a narrower student, and there is no class for that of "
            f"type {student.config.model_type}: it is added in limbeck/wide_head.py. Give a student of the teacher's "
            "width, or leave classifier out of init, as in --set init=[layers(first)]."
        )


def _take_words(student: PreTrainedModel, teacher: PreTrainedModel, project: bool) -> set[str]:
    """Copy the teacher's output embeddings; answers the names of what they are copied to."""
    ours, theirs = architectures.output_map(student), architectures.output_map(teacher)
    tied = student.config.tie_word_embeddings, teacher.config.tie_word_embeddings
    if project or ours.weight.shape != theirs.weight.shape or tied[0] != tied[1]:
        raise LimbeckError(
            "a language model's head is its output embedding: it can be reused as it is, by a student of the teacher's "
            "width and vocabulary, and no map can stand before it. Take a recipe without a reused classifier, such as "
            "lwd or ted."
        )
    ours.load_state_dict(theirs.state_dict())
    return {name for name, p in student.named_parameters() if any(p is own for own in ours.parameters())}


def embeddings(start: Start, *, frozen: bool = False) -> None:
    """The teacher's embeddings, reused; `frozen` keeps them as they are."""
    if start.teacher is None:
        raise LimbeckError("embeddings reuses the teacher's embeddings, and there is no teacher. Give --teacher.")
    theirs = start.teacher.state_dict()
    names = (architectures.block_names(start.student), architectures.norm_names(start.student))
    beside = (*names[0], *names[1], *architectures.head(start.student))
    ours = {name: p for name, p in start.student.named_parameters() if not name.startswith(beside)}
    if any(name not in theirs or theirs[name].shape != parameter.shape for name, parameter in ours.items()):
        raise LimbeckError(
            f"the teacher's embeddings ({_said(start.teacher)}) do not fit the student ({_said(start.student)}). "
            "Reusing them needs one family and one width: give such a student, or --layers to make one of the teacher."
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
    decoder_depth: int | None = None,
    width: int | None = None,
    labels: dict,
    seed: int,
) -> Start:
    """Build a student of `depth` layers (the source's, if not said) and start it as the recipe says.

    In a model with an encoder and a decoder both have `depth` layers, unless `decoder_depth` says another of the one.
    """
    config = _config(source, {"decoder": decoder_depth or depth, "encoder": depth}, width, labels, calls)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = architectures.auto_class(kinds.of(source))
        student = made.from_config(config, dtype=torch.float32, **architectures.made_with(config))
        if source.can_generate():
            student.generation_config = copy.deepcopy(source.generation_config)
        start = Start(student, source, teacher, from_teacher=source is teacher)
        for call in calls:
            bind(parse(call), INITIALISERS, "start")(start)
    if start.fresh_classifier and architectures.head(student):
        start.notes.append("pooler and classifier start afresh")
    return start


def _config(
    source: PreTrainedModel,
    depths: Mapping[Side, int | None],
    width: int | None,
    labels: dict,
    calls: Sequence[str],
) -> PretrainedConfig:
    config = copy.deepcopy(source.config)
    for name, value in labels.items():
        setattr(config, name, value)
    for side in architectures.sides(source):
        available, depth = architectures.depth(config, side), depths[side]
        if depth is not None and depth < 1:
            raise LimbeckError(f"--layers {depth}: a student has at least one layer.")
        architectures.keep_layers(config, _taken(calls, depth or available, available), side)
    if width is not None and width != config.hidden_size:
        _set_width(config, width)
    return config


def _set_width(config: PretrainedConfig, width: int) -> None:
    """Have a configuration describe a model of that width, whose heads stay as wide as they are, and are fewer."""
    unit = config.hidden_size // math.gcd(config.hidden_size, config.num_attention_heads)
    if width < 1 or width % unit:
        raise LimbeckError(f"--width {width} must be a multiple of {unit}, so that the student has whole heads.")
    heads = config.num_attention_heads * width // config.hidden_size
    for inner in ("hidden_dim", "intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"):
        if getattr(config, inner, None):
            setattr(config, inner, getattr(config, inner) * width // config.hidden_size)
    config.num_attention_heads = heads
    if hasattr(config, "decoder_attention_heads"):
        config.decoder_attention_heads = heads
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = math.gcd(config.num_key_value_heads, heads)
    config.hidden_size = width
    if hasattr(config, "pooler_hidden_size"):  # DeBERTa's
        config.pooler_hidden_size = width


def _taken(calls: Sequence[str], depth: int, available: int) -> Sequence[int]:
    """The layers of the source that the student is laid out as: those it takes, or the first."""
    for call in map(parse, calls):
        if call.name == "layers" and depth <= available:
            return _choose(bind(call, INITIALISERS, "start").keywords.get("which", "first"), depth, available)[0]
    return range(1, depth + 1)


def _depths(start: Start) -> dict[Side, tuple[int, int]]:
    """By side, how many layers the student has, and how many there are to take."""
    found = {}
    for side in architectures.sides(start.student):
        depth, available = (architectures.shape(m).at(side).layers for m in (start.student, start.source))
        if available < depth:
            raise LimbeckError(
                f"the student is to have {depth} layers and the model they come from has {available}. "
                f"Give --layers {available} or fewer."
            )
        found[side] = depth, available
    return found


def _copy(start: Start, chosen: Mapping[Side, Sequence[int]], *, with_head: bool) -> None:
    """Copy the source's weights by name, student block i of a side from the source's block `chosen[side][i]`."""
    student, source = start.student, start.source
    if student.config.hidden_size != source.config.hidden_size:
        raise LimbeckError(
            f"a student of width {student.config.hidden_size} cannot take layers of width {source.config.hidden_size}. "
            "Leave out --width, give a narrower checkpoint as --student, or start at random: in the recipe's init, "
            "random in place of layers or checkpoint (--set init=[random])."
        )
    for side, layers in chosen.items():
        _copy_blocks(start, side, layers)
    words = kinds.of(student).vocabulary  # whose head belongs to the words, as embeddings do, and to no task
    with_head = words or (with_head and start.fresh_classifier)
    beside = architectures.block_names(student) + (() if with_head else tuple(architectures.head(student)))
    start.fresh_classifier &= not words
    theirs = source.state_dict()
    student.load_state_dict({n: theirs[n] for n in student.state_dict() if not n.startswith(beside)}, strict=False)


def _copy_blocks(start: Start, side: Side, chosen: Sequence[int]) -> None:
    ours, theirs = architectures.blocks(start.student, side), architectures.blocks(start.source, side)
    first = {name: weight for name, weight in theirs[0].state_dict().items() if name in ours[0].state_dict()}
    for layer, (block, taken) in enumerate(zip(ours, chosen), 1):
        weights = theirs[taken - 1].state_dict()
        # T5's first block has the position bias of all; ModernBERT's first has no norm before its attention.
        lacking = {name: weight for name, weight in first.items() if name not in weights}
        unplaced = block.load_state_dict({**lacking, **weights}, strict=False).unexpected_keys
        if left := [name for name in unplaced if name not in first]:
            start.notes.append(f"layer {layer} has no place for {', '.join(left)} of layer {taken}, which is left out")


def _said(model: PreTrainedModel) -> str:
    return f"{model.config.model_type}, width {model.config.hidden_size}"
