"""The one training loop. It knows steps, epochs and checkpoints, and nothing of methods."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from limbeck.data.encoding import Encoded
from limbeck.data.plan import FILL, PlannedBatch, padding_share, plan, share, steps_per_epoch
from limbeck.distiller import Distiller
from limbeck.engine import compiled
from limbeck.engine.checkpoints import Checkpoint, Checkpoints, State
from limbeck.engine.progress import Display
from limbeck.engine.schedule import lr_factor, steps_of
from limbeck.engine.step import Step
from limbeck.engine.stop import Stop, Vote
from limbeck.engine.world import PRECISIONS, seed_for
from limbeck.errors import LimbeckError, did_you_mean
from limbeck.folder import RunFolder, check_place
from limbeck.recipe import Stage

Scores = dict[str, float]


@dataclass(frozen=True)
class Pace:
    """How a run goes about it; none of this changes what is learnt, but for rounding and, where blocks are compiled,
    dropout's draws."""

    micro_batch: int | None = None  # examples a process takes at once; the rest of a batch is accumulated
    log_every: int = 10  # steps
    save_every: float = 60.0  # seconds
    eager: bool = False  # never capture a step
    compile: str = "auto"  # blocks by torch.compile, on CUDA: off, auto (where a stage is long enough), on
    precision: str = "auto"  # models run in fp32, bf16, or auto: bf16 on CUDA, fp32 on CPU
    cache: str = "auto"  # the teacher's features: off, auto, or a folder to keep them in
    shard: bool = False  # cut student and teacher over the processes (FSDP2)
    recompute: bool = False  # keep no activations inside the student's blocks (gradient checkpointing)

    def __post_init__(self) -> None:
        for name in ("micro_batch", "log_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LimbeckError(f"--{name.replace('_', '-')} {value} must be 1 or more.")
        for name, allowed in (("compile", ("off", "auto", "on")), ("precision", PRECISIONS)):
            if (value := getattr(self, name)) not in allowed:
                near = did_you_mean(value, allowed)
                raise LimbeckError(f'--{name} "{value}" is not one of {", ".join(allowed)}.{near}')
        if self.recompute and self.compile == "on":
            raise LimbeckError("--recompute and --compile on exclude each other: blocks are one or the other.")
        if self.cache not in ("off", "auto"):
            _check_cache(self.cache)


def _check_cache(name: str) -> None:
    """Raise where the teacher's answers cannot be kept in a folder of that name, or it is a misspelt choice."""
    place = Path(name)
    above = next(p for p in (place, *place.absolute().parents) if p.exists())
    meant = "" if place.exists() or len(place.parts) > 1 else did_you_mean(name, ("off", "auto"))
    if meant or not name or not above.is_dir():
        raise LimbeckError(f'--cache "{name}" is not off, not auto and no folder.{meant} A new folder is ./{name}.')
    check_place(place, "--cache")


@dataclass
class Loop:
    """Trains one stage after another on the same student."""

    accelerator: Accelerator
    folder: RunFolder
    display: Display
    data: Encoded  # what the stage trains on
    longest: int
    seed: int
    pace: Pace
    evaluate: Callable[[Distiller], Scores]  # the student's scores, main metric first
    modules: dict[str, torch.nn.Module]  # what every checkpoint holds, the stage's objectives aside
    before: int = 0  # steps of the stages before
    lower: bool = False  # whether a lower score is a better one

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(self.folder.checkpoints, writes=self.accelerator.is_main_process)
        self.vote = Vote()

    def run(self, distiller: Distiller, stage: Stage, state: State, keep: str, resumed: Checkpoint | None) -> None:
        """Train a stage from where `state` stands to its end, leaving the student it keeps."""
        distiller.steps = total_steps(stage, len(self.data))
        step = self._prepared(distiller, stage)
        modules = {**self.modules, "objectives": distiller.objectives}
        if resumed:
            resumed.load(modules)
            step.resume(resumed)
        state.seconds += [0.0] * (state.stage + 1 - len(state.seconds))
        began = time.monotonic() - state.seconds[state.stage]  # as if what was done before had come just before
        saved = time.monotonic()
        self._tell_shapes(stage, state.stage)
        self.display.start(stage.name, distiller.steps, state.step)
        try:
            with Stop() as stop, step.running():
                for epoch, batch in self._batches(distiller, stage, state, keep):
                    self._step(step, distiller, stage, state, epoch, batch)
                    stops, saves = self.vote(stop.asked, self._due(saved))
                    if stops or saves:
                        state.seconds[state.stage] = time.monotonic() - began
                        state.logged = self.folder.logged()
                        self.checkpoints.save(state, modules, step.optimizer)
                        saved = time.monotonic()
                    if stops:
                        self.display.say(f"{stage.name}  stops after step {state.step}, which is saved")
                        raise KeyboardInterrupt
        finally:
            self.display.stop()
        if step.captures:
            self.display.say(f"{stage.name}  {step.captures.describe()}")
        if keep == "best" and state.best is not None:
            self.accelerator.wait_for_everyone()
            self.checkpoints.load_best(distiller.student)
        state.seconds[state.stage] = time.monotonic() - began

    def _prepared(self, distiller: Distiller, stage: Stage) -> Step:
        """The step of a stage, with all it works on where it runs."""
        distiller.to(self.accelerator.device).train()
        return Step(
            distiller,
            stage,
            self.accelerator,
            self.data.on(self.accelerator.device),
            eager=self.pace.eager,
            compiled=self._compiles(distiller, stage),
            recomputed=self.pace.recompute,
            say=self.display.say,
        )

    def _batches(
        self, distiller: Distiller, stage: Stage, state: State, keep: str
    ) -> Iterator[tuple[int, PlannedBatch]]:
        """The batches that are left, each with its epoch; at the end of an epoch the student is scored."""
        epoch_steps = steps_per_epoch(len(self.data), stage.batch)
        while True:
            epoch, at = divmod(state.step, epoch_steps)
            # A run killed between an epoch's last step and its scores has to score first.
            if state.judged < state.step and (at == 0 or state.step == distiller.steps):
                self._judge(distiller, stage, state, epoch - (at == 0), keep)
            if state.step == distiller.steps or state.stopped:
                return
            for batch in self._plan(stage, state.stage, epoch)[at : at + distiller.steps - state.step]:
                yield epoch, batch

    def _plan(self, stage: Stage, index: int, epoch: int) -> list[PlannedBatch]:
        return plan(self.data.lengths, stage.batch, seed=self.seed, stage=index, epoch=epoch, longest=self.longest)

    def _tell_shapes(self, stage: Stage, index: int) -> None:
        first = self._plan(stage, index, 0)
        shapes = len({batch.length for batch in first})
        self.display.say(
            f"{stage.name}  {shapes} batch shape{'' if shapes == 1 else 's'}; "
            f"{padding_share(first, self.data.lengths):.0%} of the token positions are padding"
        )

    def _step(
        self, step: Step, distiller: Distiller, stage: Stage, state: State, epoch: int, batch: PlannedBatch
    ) -> None:
        world = self.accelerator.num_processes
        size = math.ceil(stage.batch / world)
        pieces = math.ceil(size / self.pace.micro_batch) if self.pace.micro_batch else 1
        rank = self.accelerator.process_index
        distiller.at(epoch, state.step)
        lr = stage.lr * lr_factor(state.step, distiller.steps, stage.warmup, stage.schedule)
        # Dropout depends on seed, stage, step and rank alone, so that a resumed run needs no generator's state.
        seed = seed_for(self.seed, state.stage, state.step, rank)
        step(share(batch.ids, rank, world, pieces), batch.length, int((batch.ids != FILL).sum()), lr, seed)
        state.step += 1
        if state.step % self.pace.log_every == 0 or state.step == distiller.steps:
            values = step.read()
            self._log({"stage": stage.name, "epoch": epoch, "step": state.step, **values, "lr": lr}, state)
            self.display.step(state.step, {"loss": values["loss"]})
            if not math.isfinite(values["loss"]):
                raise FloatingPointError(
                    f"the loss of stage {stage.name} is {values['loss']} at step {state.step}: lower lr, or see which "
                    f"part grew in {self.folder.metrics}"
                )
        else:
            self.display.step(state.step)

    def _judge(self, distiller: Distiller, stage: Stage, state: State, epoch: int, keep: str) -> None:
        """Score the student after an epoch; keep it if it is the best, stop if it has long not been."""
        state.judged = state.step
        # By every process: one alone cannot run what is cut over all of them, or a term that looks at the whole batch.
        scores = [self.evaluate(distiller)]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(scores)  # which may differ in their last bits
        self._log({"stage": stage.name, "epoch": epoch, "step": state.step, "eval": scores[0]}, state)
        shown = "  ".join(f"{name} {value:.2f}" for name, value in scores[0].items())
        if not scores[0]:
            return
        value = next(iter(scores[0].values()))
        better = state.best is None or (value < state.best if self.lower else value > state.best)
        self.display.say(
            f"{stage.name}  epoch {epoch + 1}  {shown}" + ("  (best)" if better and keep == "best" else "")
        )
        if better:
            state.best, state.stale = value, 0
            if keep == "best":
                self.checkpoints.save_best(distiller.student)
        else:
            state.stale += 1
        state.stopped = stage.patience is not None and state.stale >= stage.patience

    def _log(self, record: dict, state: State) -> None:
        if self.accelerator.is_main_process:
            self.folder.log(record)
        if self.accelerator.trackers:
            flat = {k: v for k, v in {**record, **record.get("eval", {})}.items() if isinstance(v, int | float)}
            done = self.before + state.step  # trackers want steps that only grow
            self.accelerator.log({f"{record['stage']}/{k}": v for k, v in flat.items()}, step=done)

    def _compiles(self, distiller: Distiller, stage: Stage) -> bool:
        """Whether blocks are compiled in this stage."""
        if self.accelerator.device.type != "cuda":
            if self.pace.compile == "on":
                self.display.say("--compile on: blocks are compiled on a GPU, and there is none; they run as they are")
            return False
        tokens = distiller.steps * stage.batch * float(self.data.lengths.mean())
        pays = compiled.pays(distiller.student, tokens, alone=self.accelerator.num_processes == 1)
        return self.pace.compile == "on" or (self.pace.compile == "auto" and pays and not self.pace.recompute)

    def _due(self, saved: float) -> bool:
        return time.monotonic() - saved >= self.pace.save_every


def total_steps(stage: Stage, examples: int) -> int:
    """How many optimiser steps a stage takes."""
    return stage.steps or max(1, steps_of(stage.epochs or 0, steps_per_epoch(examples, stage.batch)))
