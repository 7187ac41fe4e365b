"""Which devices and processes train, through Accelerate."""

import os
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, LoggerType, patch_environment

from limbeck.errors import LimbeckError, did_you_mean

# How long processes wait for each other. One of them writes checkpoints, and scores at the end, alone, which may take
# hours; NCCL's own ten minutes would end the others, and with them the run. That a process died, torchrun sees.
PATIENCE = timedelta(days=1)


PRECISIONS = ("auto", "fp32", "bf16")
_opened: set[str] = set()  # the precisions that runs of this process had, in Accelerate's words


def open_world(*, precision: str = "auto", track: str | None = None, folder: Path | None = None) -> Accelerator:
    """An Accelerator that sees every process there is. Of itself it runs in bf16 on CUDA and in fp32 on CPU."""
    _check_plugins()
    cuda = torch.cuda.is_available()
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    known = [kind.value for kind in LoggerType if kind != LoggerType.ALL]
    if track is not None and track not in known:
        raise LimbeckError(f'there is no tracker "{track}".{did_you_mean(track, known)} Known: {", ".join(known)}.')
    mixed = "bf16" if precision == "bf16" or (precision == "auto" and cuda) else "no"
    _forget_other_precision(mixed)
    with patch_environment(ACCELERATE_USE_DEEPSPEED="false"):  # what it would do, engine/deepspeed.py has done
        accelerator = Accelerator(
            # Without cpu=True, torchrun on a machine without accelerator gives as many worlds of one as processes.
            cpu=not cuda,
            mixed_precision=mixed,
            log_with=track,
            project_dir=str(folder) if folder else None,
            # Buffers are schedules and anchors: functions of seed and step, equal everywhere. (The option's newer name
            # is not known to every torch we run on, hence the warning that is not shown.)
            kwargs_handlers=[
                DistributedDataParallelKwargs(broadcast_buffers=False),
                InitProcessGroupKwargs(timeout=PATIENCE),
            ],
        )
    _opened.add(mixed)
    if track is not None and not accelerator.log_with:
        raise LimbeckError(f"--track {track} needs its package, which is not installed: pip install {track}")
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != accelerator.num_processes:
        raise LimbeckError(
            f"{started} processes were started but this one sees {accelerator.num_processes}: they would train apart. "
            "Start them with torchrun --nproc_per_node N -m limbeck …"
        )
    return accelerator


def _forget_other_precision(mixed: str) -> None:
    """Accelerate knows one precision a process, and an earlier run may have had another."""
    there = AcceleratorState._shared_state.get("_mixed_precision", mixed)
    if there == mixed:
        return
    if there not in _opened:
        raise LimbeckError(
            f'this process has an Accelerator of its own, which runs in "{there}", and knows one precision only. Ask '
            f"for the same with precision=, or call limbeck in a process of its own."
        )
    AcceleratorState._reset_state()


def _check_plugins() -> None:
    """What Accelerate's configuration would have other engines do, this one does itself."""
    for name, plugin in (("FSDP", "Accelerate's own FSDP"), ("MEGATRON_LM", "Megatron-LM")):
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("1", "true", "yes"):
            raise LimbeckError(
                f"Accelerate's configuration asks for {plugin}, which limbeck does not run: it cuts models over "
                "processes itself. Choose plain multi-GPU (accelerate launch --multi_gpu, or torchrun), and add "
                "--shard to limbeck."
            )


def seed_for(*parts: int) -> int:
    """One seed from several numbers: a run's seed, a stage, a step, a rank."""
    mixed = 0
    for part in parts:
        mixed = (mixed * 1_000_003 + part + 1) % (2**63 - 25)
    return mixed


def close_world() -> None:
    """Take leave of the other processes, if there are any: a thread that still listens to them may abort the exit."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
