"""Models and tokenizers, from a hub id, a folder or a run folder; always fp32, always safetensors."""

import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.configuration_utils import PretrainedConfig
from transformers.utils import logging

from limbeck import architectures
from limbeck.data import kinds
from limbeck.data.label_order import is_generic
from limbeck.data.labels import keys
from limbeck.data.spec import DataSpec
from limbeck.data.tasks import Task
from limbeck.errors import LimbeckError, did_you_mean

MOST = sys.maxsize  # tokens: as many as a model takes


def locate(name: str) -> str:
    """A model's folder or hub id; a run folder stands for the student in it."""
    path = Path(name)
    if (path / "student" / "config.json").is_file():
        return str(path / "student")
    if path.exists() and not (path / "config.json").is_file():
        raise LimbeckError(f'"{name}" holds no model: there is no config.json in it, and no student/ folder of a run.')
    if not path.exists() and (path.is_absolute() or name.startswith(".") or name.count("/") > 1):
        raise LimbeckError(
            f'there is no folder "{name}". Give one with config.json, tokenizer and model.safetensors, a run folder or '
            "the id of a model on the hub (owner/name)."
        )
    return name


def config_of(name: str) -> PretrainedConfig:
    """A model's configuration."""
    return _loaded(name, lambda place: AutoConfig.from_pretrained(place, trust_remote_code=False))


def load_model(name: str, task: Task | None = None) -> PreTrainedModel:
    """A model with a head of its own kind, its weights in fp32. Where the checkpoint has no head that is of use for
    `task`, a fresh one is made for it; for bodies of running text there is none."""
    config = config_of(name)
    wanted = kinds.KINDS[task.kind] if task else kinds.KINDS["classification"]
    own = _own_kind(config, task)
    fresh = own is None
    if fresh and task is None:
        raise LimbeckError(
            f'"{name}" has no classifier of its own ({", ".join(config.architectures or ["no architecture named"])}). '
            f"Fine-tune it first: limbeck finetune --model {name} --out runs/teacher …"
        )
    labels = label_options(task) if fresh and task else {}

    def read(place: str) -> tuple[PreTrainedModel, dict[str, Any]]:
        # A half-precision file would otherwise be trained in half precision, and learn nothing.
        options = labels | architectures.made_with(config)
        return architectures.auto_class(own or wanted).from_pretrained(
            place,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )

    model, told = _loaded(name, read)
    architectures.family(model)
    _check_whole(name, model, told, new_head=fresh or wanted.bare)
    return model


def _check_whole(name: str, model: PreTrainedModel, told: Mapping[str, Any], *, new_head: bool) -> None:
    """Every weight was in the file, but for those of a head that is made anew: transformers draws the others."""
    # A body has a pooler that nothing reads, and checkpoints of masked words lack. Tables of sines are never drawn.
    free = [f"{name}." for name, module in model.named_modules() if "Sinusoidal" in type(module).__name__]
    free += [*architectures.head(model), "pooler."] if new_head else []
    drawn = [weight for weight, _ in model.named_parameters() if weight in told["missing_keys"]]
    if new_head:
        drawn = [weight for weight in drawn if weight.startswith(architectures.base_path(model))]
    if drawn := [weight for weight in drawn if not weight.startswith(tuple(free))]:
        others = f"; in their stead there is {min(told['unexpected_keys'])}" if told["unexpected_keys"] else ""
        raise LimbeckError(
            f'"{name}" lacks {len(drawn)} of the weights of a {type(model).__name__}, such as {drawn[0]}{others}. They '
            "would be drawn at random. Save the whole model, under the names that transformers gives its weights: "
            "model.save_pretrained(FOLDER)."
        )


def with_kind(data: DataSpec, name: str | None) -> DataSpec:
    """The data of a user who did not say of which kind they are, where files tell: `.json` is SQuAD's layout; of
    running text is learnt what the model predicts, if it is words."""
    files = [str(file).lower() for file in (data.train, data.eval, data.test) if file]
    if data.kind is None and data.task is None and any(file.endswith(".json") for file in files):
        return replace(data, kind="question-answering")
    texts = [file for file in files if file.endswith(".txt")]
    if data.kind is not None or not texts or name is None:
        return data
    kind = _kind_of(config_of(name))
    return replace(data, kind=kind.name) if kind is not None and kind.packed else data


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model."""
    tokenizer = _loaded(name, lambda place: AutoTokenizer.from_pretrained(place, trust_remote_code=False))
    # Without its files, transformers makes one that knows no word: every text would be a row of unknowns.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise LimbeckError(f'"{name}" has no tokenizer beside it. Save one there: tokenizer.save_pretrained("{name}").')
    return tokenizer


def label_options(task: Task) -> dict:
    """A task's labels as a configuration has them."""
    return kinds.KINDS[task.kind].settings(task.labels)


def label_names(model: PreTrainedModel) -> list[str]:
    """The names of a model's classes, in order."""
    return [name for _, name in sorted((int(i), name) for i, name in (model.config.id2label or {}).items())]


def check_kind(model: PreTrainedModel, task: Task, owner: str) -> None:
    """A model of scores for a regression task, one of classes for a classification task, and so on."""
    if (kind := kinds.of(model)).name != (kinds.KINDS[task.kind].like or task.kind):
        predicts = f"{model.config.num_labels} {kind.classes}" if kind.named else kind.predicts
        raise LimbeckError(
            f"{owner} predicts {predicts}, and {task.name} is a {task.kind} task. Give a model fine-tuned on this task."
        )


def fits_labels(model: PreTrainedModel, task: Task) -> bool:
    """Whether a classifier predicts the task's labels, in whatever order, or as many without names."""
    wanted = kinds.KINDS[task.kind].like or task.kind
    if kinds.of(model).name != wanted or not kinds.of(model).named:
        return kinds.of(model).name == wanted
    names = label_names(model)
    generic = is_generic(dict(enumerate(names)))
    same = generic or sorted(keys(names, names)) == sorted(keys(task.labels, names))
    return len(names) == len(task.labels) and same


def renew_classifier(model: PreTrainedModel, task: Task, seed: int) -> PreTrainedModel:
    """The same model with a fresh pooler and classifier, for the task."""
    config = copy.deepcopy(model.config)
    for name, value in label_options(task).items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto = architectures.auto_class(kinds.KINDS[task.kind])
        fresh = auto.from_config(config, dtype=torch.float32, **architectures.made_with(config))
    heads = (*architectures.head(fresh), *architectures.head(model))
    body = {name: weight for name, weight in model.state_dict().items() if not name.startswith(heads)}
    fresh.load_state_dict(body, strict=False)
    return fresh


def adopt_labels(model: PreTrainedModel, task: Task, owner: str) -> None:
    """Put a classifier's rows in the task's label order, by name; names that say nothing are taken to be in order."""
    names = label_names(model)
    if not fits_labels(model, task):
        raise LimbeckError(
            f"the labels of {owner} ({', '.join(names)}) are not those of {task.name} "
            f"({', '.join(task.labels) or kinds.KINDS[task.kind].predicts}). "
            "Give a checkpoint without a classifier, or one trained on these labels."
        )
    if not kinds.KINDS[task.kind].named:
        return
    if not is_generic(dict(enumerate(names))):
        at = {key: i for i, key in enumerate(keys(names, names))}
        order = [at[key] for key in keys(task.labels, names)]
        output = architectures.output_map(model)
        with torch.no_grad():
            output.weight.copy_(output.weight[order])
            if output.bias is not None:
                output.bias.copy_(output.bias[order])
    options = label_options(task)
    model.config.id2label, model.config.label2id = options["id2label"], options["label2id"]


def check_vocabulary(teacher: PreTrainedTokenizerBase, student: str, config: PretrainedConfig) -> None:
    """Both models must read the same tokens."""
    if config.vocab_size < len(teacher):
        raise LimbeckError(
            f'student "{student}" knows {config.vocab_size} tokens and the teacher\'s tokenizer makes {len(teacher)}: '
            "they read different vocabularies. Give a student with the teacher's tokenizer."
        )
    try:
        own = load_tokenizer(student)
    except LimbeckError:
        return  # a checkpoint without a tokenizer of its own uses the teacher's
    theirs, ours = teacher.get_vocab(), own.get_vocab()
    if theirs != ours:
        word = next(iter(sorted(word for word in theirs.keys() | ours.keys() if theirs.get(word) != ours.get(word))))
        raise LimbeckError(
            f'student "{student}" and the teacher read different vocabularies: "{word}" is token {ours.get(word)} of '
            f"the student and {theirs.get(word)} of the teacher. Give a student with the teacher's tokenizer."
        )


def check_tokens(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """A model must know every token its tokenizer makes."""
    known = config_of(name).vocab_size
    if len(tokenizer) > known:
        raise LimbeckError(
            f'the tokenizer of "{name}" makes {len(tokenizer)} tokens and the model knows {known}: they do not belong '
            "together. Save the model's own tokenizer beside it."
        )


def stop_layer_drop(model: PreTrainedModel) -> list[str]:
    """Have every layer run in training too, since what LayerDrop leaves out can be compared with nothing; a line that
    says so, where it was on."""
    found = architectures.droppers(model)
    for stack in found:
        stack.layerdrop = 0.0  # type: ignore[assignment] -- a number, not a tensor
    settings = [name for name in ("encoder_layerdrop", "decoder_layerdrop", "layerdrop") if hasattr(model.config, name)]
    for name in settings:
        setattr(model.config, name, 0.0)
    said = f"{type(model).__name__} would leave out layers at random while it trains: {', '.join(settings)} set to 0"
    return [said] if found else []


def adopt_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """A classifier that reads the last token finds it by the padding behind it, which is the tokenizer's."""
    if architectures.pooling(model) == "last":
        model.config.pad_token_id = tokenizer.pad_token_id


def longest_input(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, wanted: int) -> int:
    """How many tokens both the model's positions and its tokenizer allow."""
    if wanted < 3:
        raise LimbeckError(f"--max-length {wanted} must be 3 or more: a token, and the two that stand around it.")
    return min(wanted, architectures.positions(config), tokenizer.model_max_length)


def lacks_classifier(name: str, task: Task) -> bool:
    """Whether a checkpoint gets a fresh classifier when it is loaded for a task."""
    return _own_kind(config_of(name), task) is None


def _own_kind(config: PretrainedConfig, task: Task | None) -> kinds.Kind | None:
    """The kind that a checkpoint is read as: its own, or None if it has no head, or one of no use for the task."""
    wanted, own = kinds.KINDS[task.kind] if task else None, _kind_of(config)
    if wanted is None:
        return own
    if wanted.bare:
        return wanted
    # A language model has no classifier; read as one, it keeps a pooler it may have.
    return None if own is not None and own.vocabulary and not wanted.vocabulary else own


def _kind_of(config: PretrainedConfig) -> kinds.Kind | None:
    """The kind of task a checkpoint has a head for."""
    return next(filter(None, (kinds.declared(name, config) for name in config.architectures or [])), None)


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own bars and reports, which say in ten lines what a run says in one."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _loaded(name: str, read: Callable[[str], Any]) -> Any:
    try:
        with quiet():
            return read(locate(name))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        beside = Path(name).parent
        if name.count("/") == 1 and beside.is_dir() and not Path(name).exists():
            folders = [str(place) for place in sorted(beside.iterdir()) if place.is_dir()]
            reason = f'there is no folder "{name}".{did_you_mean(name, folders)} As a hub id: {reason}'
        if _only_pickled(Path(name)):
            reason = (
                "its weights are pickled (.bin), and unpickling can run any code. If you trust it, load it with "
                "transformers once and save it again: model.save_pretrained(FOLDER)."
            )
        raise LimbeckError(
            f'"{name}" could not be loaded: {reason} Give a folder with config.json, tokenizer and model.safetensors, '
            "a run folder, or the id of a model on the hub."
        ) from error


def _only_pickled(folder: Path) -> bool:
    """Whether a folder has what a model needs, but for weights of a kind that is safe to read."""
    with suppress(OSError, ValueError):
        json.loads((folder / "config.json").read_text("utf8"))
        return any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("*.safetensors"))
    return False
