"""What a DeepSpeed configuration asks for, in limbeck's own words: torch carries it out, the package is not needed."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from limbeck.engine.loop import Pace
from limbeck.errors import LimbeckError
from limbeck.recipe import Recipe
from limbeck.spec import literal, shares

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Keys that set a value of every stage.
STAGE = {
    "gradient_clipping": "clip",
    "optimizer.params.lr": "lr",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.betas": "betas",
    "optimizer.params.eps": "eps",
    "scheduler.type": "schedule",
    "scheduler.params.warmup_max_lr": "lr",
    "scheduler.params.warmup_num_steps": "warmup",
}
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
RECOMPUTE = ("activation_checkpointing.partition_activations", "activation_checkpointing.number_checkpoints")
# Keys that can have these values alone, since nothing else is done here.
ONLY: dict[str, tuple] = {
    "zero_optimization.stage": (0, 1, 2, 3),
    "optimizer.type": ("AdamW", "Adam"),  # DeepSpeed's Adam decays weights as AdamW does, unless told not to
    "optimizer.params.adam_w_mode": (True,),
    "optimizer.params.bias_correction": (True,),
    "scheduler.type": tuple(SCHEDULES),
    "scheduler.params.warmup_num_steps": (0,),  # a warm-up is a share of the steps here
    "scheduler.params.warmup_min_lr": (0,),
    "scheduler.params.warmup_type": ("linear",),
    "gradient_predivide_factor": (1,),
}
# Keys that change what is learnt, or where things are kept, among those that do not.
REFUSED = ("zero_optimization.*offload*", "zero_optimization.*quantized*", "activation_checkpointing.cpu_checkpointing")
IGNORED = (
    *("zero_optimization.*", "activation_checkpointing.*", "bf16.*", "aio.*", "checkpoint.*"),
    *("steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "disable_allgather"),
    *("flops_profiler.*", "comms_logger.*", "tensorboard.*", "wandb.*", "comet.*", "csv_monitor.*"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "optimizer.params.torch_adam"),
)
HONOURED = {*BATCH, *STAGE, *RECOMPUTE, *ONLY, "bf16.enabled"}


@dataclass(frozen=True)
class Wishes:
    """What a configuration asks for: values of every stage and of the pace, and lines that say what becomes of it."""

    stage: Mapping[str, Any] = field(default_factory=dict)
    pace: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def changes(self) -> list[str]:
        """The values of stages, as `--set` takes them."""
        return [f"stages.*.{key}={value}" for key, value in self.stage.items()]

    def paced(self, pace: Pace, recipe: Recipe) -> Pace:
        """The pace that is asked for. Neither `pace` nor what was set in the recipe after `changes` may say another."""
        for stage in recipe.stages:
            for key, value in self.stage.items():
                _agree(f"{key} of stage {stage.name}", getattr(stage, key), value)
        for key, value in self.pace.items():
            if getattr(pace, key) != getattr(Pace, key):
                _agree(f"--{key.replace('_', '-')}", getattr(pace, key), value)
        return replace(pace, **self.pace)


def wishes(path: str | Path | None) -> Wishes:
    """What the file at `path`, or Accelerate's configuration, asks for; nothing where there is neither."""
    launched = _from_accelerate()
    config = launched if path is None else _read(path)
    if launched is not None and config != launched:
        raise LimbeckError(f"--deepspeed {path} and Accelerate's configuration say different things. Give one of them.")
    return Wishes() if config is None else understood(config, processes=int(os.environ.get("WORLD_SIZE", "1")))


def understood(config: Mapping[str, Any], *, processes: int) -> Wishes:
    """What a configuration asks for; every key that cannot be honoured is named at once."""
    asked = dict(_keys(config))
    if faults := list(_faults(asked)):
        raise LimbeckError(
            "DeepSpeed's configuration cannot be carried out (what is left out there is left to limbeck):\n"
            + "\n".join(f"  {fault}" for fault in faults)
        )
    batch, micro_batch = _batch(asked, processes)
    stage = {name: SCHEDULES.get(str(asked[key]), asked[key]) for key, name in STAGE.items() if key in asked}
    stage |= {"batch": batch}
    cut, half = asked.get("zero_optimization.stage"), asked.get("bf16.enabled")
    pace = {
        "micro_batch": micro_batch,
        "shard": None if cut is None or (cut and processes == 1) else cut > 0,
        "recompute": any(asked.get(key) for key in RECOMPUTE) or None,
        "precision": None if half in (None, "auto") else "bf16" if half else "fp32",
    }
    stage, pace = ({key: value for key, value in one.items() if value is not None} for one in (stage, pace))
    taken = ", ".join(f"{key} {value}" for key, value in (stage | pace).items())
    notes = [f"DeepSpeed's configuration is carried out by torch: {taken or 'it changes nothing'}"]
    if cut in (1, 2) and processes > 1:
        notes.append(f"zero_optimization.stage {cut}: weights are cut over the processes too, as by stage 3")
    if ignored := [key for key, value in asked.items() if value and _ignored(key)]:
        notes.append(f"keys of DeepSpeed's that change nothing here are ignored: {', '.join(ignored)}")
    return Wishes(stage, pace, tuple(notes))


def _faults(asked: Mapping[str, Any]) -> Iterator[str]:
    for key, value in asked.items():
        if key in ONLY and value not in ONLY[key]:
            yield f"{key} is {value!r}. Possible: {', '.join(map(str, ONLY[key]))}."
        elif key in BATCH and not (isinstance(value, int) and value > 0):
            yield f"{key} is {value!r}, and has to be a whole number from 1 on."
        elif STAGE.get(key) == "betas":
            with suppress(ValueError):
                if value == shares(value):  # numbers, and not what reads as such
                    continue
            yield f"{key} is {value!r}, and has to be two numbers from 0 to below 1."
        elif key in STAGE and key not in ONLY and not isinstance(value, int | float):
            yield f"{key} is {value!r}, and has to be a number."
        elif value and key not in HONOURED and not _ignored(key):
            yield f"{key}: nothing in limbeck does this."
    if len({str(asked[key]) for key, name in STAGE.items() if name == "lr" and key in asked}) > 1:
        yield "optimizer.params.lr and scheduler.params.warmup_max_lr differ."


def _ignored(key: str) -> bool:
    return key not in HONOURED and _matches(key, IGNORED) and not _matches(key, REFUSED)


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(key, pattern) for pattern in patterns)


def _batch(asked: Mapping[str, Any], processes: int) -> tuple[int | None, int | None]:
    """The batch of a step and the examples a process takes at once, as far as they are asked for."""
    whole, micro, pieces = (asked.get(key) for key in BATCH)
    if whole is None and micro is None:
        if pieces in (None, 1):
            return None, None
        raise LimbeckError(
            f"DeepSpeed's configuration has gradient_accumulation_steps {pieces}, but no batch to accumulate: add "
            "train_batch_size or train_micro_batch_size_per_gpu; or leave it out and give --micro-batch."
        )
    given = micro or pieces
    pieces = pieces or (max(1, whole // (micro * processes)) if whole and micro else 1)
    micro = micro or (whole or 0) // (pieces * processes)
    if whole not in (None, micro * pieces * processes):
        raise LimbeckError(
            f"DeepSpeed's configuration has train_batch_size {whole}, which is not micro-batch × accumulation × "
            f"processes: {micro} × {pieces} × {processes} = {micro * pieces * processes}."
        )
    return micro * pieces * processes, micro if given else None


def _keys(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values, without what is "auto" or turned off. A section of which no key is known is one."""
    for name, value in config.items():
        key = f"{above}{name}"
        if value is None or value in ("auto", "none"):
            continue
        if not isinstance(value, Mapping):
            yield key, value
        elif value.get("enabled") is False:
            yield f"{key}.enabled", False
        elif value.get("enabled") != "auto" and value.get("device", True) not in (None, "none"):
            known = any(one.startswith(f"{key}.") for one in (*HONOURED, *IGNORED))
            yield from _keys(value, f"{key}.") if known else [(key, value)]


def _agree(name: str, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise LimbeckError(
            f'{name} is {ours}, and DeepSpeed\'s configuration says {theirs}. Say it once: what is "auto" there is '
            "left to limbeck."
        )


def _read(path: str | Path) -> dict[str, Any]:
    try:
        config = json.loads(Path(path).read_text("utf8"))
    except (OSError, ValueError) as error:
        raise LimbeckError(f'--deepspeed "{path}" cannot be read as JSON: {error}') from error
    if not isinstance(config, dict):
        raise LimbeckError(f'--deepspeed "{path}" holds no configuration: it starts with {{"zero_optimization": ….')
    return config


def _from_accelerate() -> dict[str, Any] | None:
    """What `accelerate launch --use_deepspeed` was told, which it hands on in the environment."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() != "true":
        return None
    if (path := os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")) != "none":
        return _read(path)
    return {
        "zero_optimization": {
            "stage": _told("DEEPSPEED_ZERO_STAGE", "2"),
            "offload_optimizer": {"device": _told("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")},
            "offload_param": {"device": _told("DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none")},
        },
        "gradient_accumulation_steps": _told("GRADIENT_ACCUMULATION_STEPS", "auto"),
        "gradient_clipping": _told("GRADIENT_CLIPPING", "auto"),
        "fp16": {"enabled": _told("MIXED_PRECISION", "no") == "fp16"},
    }


def _told(name: str, default: str) -> Any:
    return literal(os.environ.get(f"ACCELERATE_{name}", default))
