"""Recipe → stages → saved student: one run, and the folder it leaves."""

import copy
import json
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Unpack

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from limbeck import __version__, evaluation
from limbeck import recipe as recipes
from limbeck.data.kinds import KINDS
from limbeck.data.spec import DataOptions, DataSpec
from limbeck.distiller import Distiller
from limbeck.engine.checkpoints import Checkpoint, Checkpoints, State, load_into
from limbeck.engine.deepspeed import wishes
from limbeck.engine.loop import Loop, Pace
from limbeck.engine.progress import Display, clock
from limbeck.engine.sharding import check_processes, fill, gathered, shard, shell
from limbeck.engine.world import open_world
from limbeck.errors import LimbeckError
from limbeck.folder import RunFolder, check_place, write_file, write_folder, write_json, write_text
from limbeck.identity import check_same, identity, moved
from limbeck.models import quiet
from limbeck.prepare import Prepared, prepare
from limbeck.projector import folded
from limbeck.report.card import model_card
from limbeck.report.page import write_report
from limbeck.report.tables import nothing_learnt
from limbeck.request import Request, request
from limbeck.scoring import score_bodies, score_run, score_stage
from limbeck.spec import allowing
from limbeck.teachers import Live, remembering
from limbeck.trained import whole_modules


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    scores: dict[str, Any]

    @property
    def student(self) -> Path:
        """The student, as a plain Hugging Face folder."""
        return self.folder / "student"


def distill(
    recipe: str,
    *,
    out: str | Path,
    teacher: str | Path | None = None,
    layers: int | None = None,
    decoder_layers: int | None = None,
    side: str | None = None,
    width: int | None = None,
    student: str | Path | None = None,
    seed: int = 42,
    set: Iterable[str] = (),
    allow_code: bool = False,
    resume: bool = False,
    track: str | None = None,
    pace: Pace | None = None,
    deepspeed: str | Path | None = None,
    quiet: bool = False,
    **data: Unpack[DataOptions],
) -> Run:
    """Distil `teacher` into a student of `layers` layers, or into the checkpoint `student`. A student with an encoder
    and a decoder has so many in both, unless `decoder_layers` says how many of the one; `side` says whose layers are
    compared: the decoder's, the encoder's or both.

    `data` says what to learn from, in the words of the command line: `task` and `data`, or `train`, `eval`, `test`
    with `text`, `text_pair`, `label`, `labels`, `kind`, `max_length`, `stride`; `few`, `label_noise`, `supplement`.
    `set` changes values of the recipe, as `--set` does; `allow_code` lets it name Python functions by dotted path.
    `deepspeed` is a configuration of DeepSpeed's, to be carried out by torch (docs/scale.md).
    """
    wished = wishes(deepspeed)
    asked = request(
        recipe,
        DataSpec.named(**data),
        set=(*wished.changes, *set),
        allow_code=allow_code,
        teacher=str(teacher) if teacher else None,
        student=str(student) if student else None,
        layers=layers,
        decoder_layers=decoder_layers,
        side=side,
        width=width,
        seed=seed,
    )
    pace = wished.paced(pace or Pace(), asked.recipe)
    return execute(asked, out, resume=resume, track=track, pace=pace, notes=wished.notes, quiet=quiet)


def finetune(
    model: str | Path,
    *,
    out: str | Path,
    layers: int | None = None,
    seed: int = 42,
    set: Iterable[str] = (),
    allow_code: bool = False,
    resume: bool = False,
    track: str | None = None,
    pace: Pace | None = None,
    deepspeed: str | Path | None = None,
    quiet: bool = False,
    **data: Unpack[DataOptions],
) -> Run:
    """Fine-tune `model`, or its first `layers` layers, on labels: a teacher, or a baseline. `data` as in `distill`."""
    wished = wishes(deepspeed)
    asked = request(
        "finetune",
        DataSpec.named(**data),
        set=(*wished.changes, *set),
        allow_code=allow_code,
        student=str(model),
        layers=layers,
        seed=seed,
    )
    pace = wished.paced(pace or Pace(), asked.recipe)
    return execute(asked, out, resume=resume, track=track, pace=pace, notes=wished.notes, quiet=quiet)


def execute(
    asked: Request,
    out: str | Path,
    *,
    resume: bool = False,
    track: str | None = None,
    pace: Pace | None = None,
    notes: Iterable[str] = (),
    quiet: bool = False,
) -> Run:
    """Carry out a request: train every stage, score the student, leave the run folder. `notes` are said first."""
    with allowing(asked.allow_code):
        return _execute(asked, RunFolder(out), resume, track, pace or Pace(), notes, quiet)


def _execute(
    asked: Request, folder: RunFolder, resume: bool, track: str | None, pace: Pace, notes: Iterable[str], quiet: bool
) -> Run:
    _check_folder(folder, resume)
    began = time.monotonic()
    accelerator = open_world(precision=pace.precision, track=track, folder=folder.path)
    if pace.shard:
        check_processes()
    display = Display(quiet=quiet or not accelerator.is_main_process)
    prepared = prepare(asked)
    again = resume and folder.request.exists()
    begun = False
    half = accelerator.mixed_precision == "bf16"
    conditions = {**environment(), "precision": "bf16" if half else "fp32", "compile": pace.compile}
    if again:
        check_same(folder, prepared)
        if folder.finished:
            return _finished(folder, accelerator, display)
        begun = Checkpoints(folder.checkpoints).newest() is not None
        notes = [*notes, *filter(None, [moved(folder, conditions) if begun else None])]
    for note in (*notes, *prepared.notes):
        display.say(note)
    for index in range(len(prepared.stages)):
        prepared.set_trained(index)  # faults of any stage show now
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        _begin(folder, prepared, conditions, again=begun)
        display.keep_in(folder.said)
    accelerator.wait_for_everyone()
    if track:
        accelerator.init_trackers("limbeck")
    state, earlier = _train(prepared, folder, accelerator, display, pace, again)
    scored = score_bodies(prepared, accelerator.device) if KINDS[prepared.task.kind].bare else None
    scores: dict[str, Any] = {}
    if accelerator.is_main_process:
        prepared.student = folded(prepared.student)  # what is scored is what is saved
        total = earlier + time.monotonic() - began
        scores = score_run(prepared, scored, accelerator.device, total=total, per_stage=state.seconds)
        _leave(prepared, folder, scores)
        display.say(_summary(scores, folder))
        if warning := nothing_learnt(scores):
            display.say(warning)
    if track:
        accelerator.end_training()
    accelerator.wait_for_everyone()
    return Run(folder.path, scores)


def _finished(folder: RunFolder, accelerator, display: Display) -> Run:
    """A run that ended before, tidied up if it was killed just then."""
    if folder.checkpoints.exists() and accelerator.is_main_process:
        _tidy(folder)
    display.say(f"{folder.path} is finished; its scores are in {folder.scores}.")
    return Run(folder.path, json.loads(folder.scores.read_text("utf8")))


def _train(
    prepared: Prepared, folder: RunFolder, accelerator, display: Display, pace: Pace, resumed: bool
) -> tuple[State, float]:
    """Train every stage; how things stand at the end, and the seconds that earlier tries of a resumed run took."""
    student, light = _place_models(prepared, accelerator, pace.shard)
    selected = next(iter(prepared.evals.values()))
    loop = Loop(
        accelerator=accelerator,
        folder=folder,
        display=display,
        data=prepared.train,
        longest=prepared.longest,
        seed=prepared.request.seed,
        pace=pace,
        evaluate=lambda distiller: score_stage(prepared, distiller, student, selected),
        modules=_kept(prepared, student),
        lower=evaluation.lower_is_better(prepared.task),
    )
    checkpoint = loop.checkpoints.newest()
    state = checkpoint.state if checkpoint else State(seconds=[0.0] * len(prepared.stages))
    earlier = sum(state.seconds)
    folder.cut_log(state.logged)
    if checkpoint:
        checkpoint.load(_between(prepared, loop, state))
        display.say(f"goes on at stage {min(state.stage + 1, len(prepared.stages))}, step {state.step}")
        if state.stage == len(prepared.stages):
            prepared.distillers[-1].finish()
    elif resumed:
        display.say("there is no checkpoint yet: starts at the beginning")
    while state.stage < len(prepared.stages):
        if light is not None and "teacher" in loop.modules:
            load_into(light, loop.modules["teacher"].state_dict())
        _train_stage(prepared, loop, state, checkpoint if checkpoint and state.step > 0 else None)
        if accelerator.is_main_process and state.stage + 1 < len(prepared.stages):
            _leave_beside(prepared.distillers[state.stage], folder.aligners(prepared.stages[state.stage].name))
        state = State(stage=state.stage + 1, seconds=state.seconds, logged=folder.logged())
        loop.checkpoints.save(state, _between(prepared, loop, state), None)
        accelerator.wait_for_everyone()
        checkpoint = None
    if pace.shard:
        fill(prepared.student, student, keep=accelerator.is_main_process)
    return state, earlier


def _place_models(prepared: Prepared, accelerator, sharded: bool) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Put everything where it trains: the student, and the copy of the teacher that runs, where that is not itself."""
    student = prepared.student.to(accelerator.device)  # type: ignore[arg-type]
    half = accelerator.mixed_precision == "bf16"
    light = None
    if prepared.teacher is not None and (half or sharded):
        light = copy.deepcopy(prepared.teacher).to(torch.bfloat16 if half else torch.float32)  # type: ignore[arg-type]
    for distiller in prepared.distillers:
        if isinstance(distiller.teacher, Live) and light is not None:
            distiller.teacher.lighten(light)
        distiller.to(accelerator.device)
    if sharded:
        prepared.student = shell(student)
        shard(student, half=half)
        if light is not None:
            shard(light)
    return student, light


def _kept(prepared: Prepared, student: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """What every checkpoint holds: all that a stage may have changed for those after it."""
    aligners = {f"aligners.{n}": a.module for n, a in prepared.aligners.items() if a.module is not None}
    terms = [term for distiller in prepared.distillers[:-1] for term in distiller.terms.values()]
    kept: dict[str, torch.nn.Module] = {"student": student, **aligners}
    if prepared.teacher is not None and any(term.moves_teacher for term in terms):
        kept["teacher"] = prepared.teacher
    return kept


def _between(prepared: Prepared, loop: Loop, state: State) -> dict[str, torch.nn.Module]:
    """What is kept between stages: aligners without a name die with theirs, but the last stage's are saved."""
    over = state.stage == len(prepared.stages)
    return {**loop.modules, "objectives": prepared.distillers[-1].objectives} if over else loop.modules


def _train_stage(prepared: Prepared, loop: Loop, state: State, resumed: Checkpoint | None) -> None:
    """Train the stage at which things stand, from its beginning or from a checkpoint in its midst."""
    index, began = state.stage, time.monotonic()
    distiller, stage = prepared.distillers[index], prepared.stages[index]
    if frozen := prepared.set_trained(index):
        named = _listed(whole_modules(distiller, set(frozen)))
        loop.display.say(f"stage {stage.name}: no objective reaches {named}; frozen")
    loop.data = prepared.data(index)
    live = distiller.teacher
    if isinstance(live, Live) and distiller.steady:
        distiller.teacher = remembering(
            live,
            loop.data,
            passes=distiller.steps * stage.batch / len(loop.data),
            choice=loop.pace.cache,
            device=loop.accelerator.device,
            say=loop.display.say,
        )
    state.seconds[index] += time.monotonic() - began
    loop.before = sum(earlier.steps for earlier in prepared.distillers[:index])
    loop.run(distiller, stage, state, prepared.keeps(index), resumed)
    distiller.finish()
    if live is not None:
        distiller.teacher = live  # the memory of a cache goes with its stage


def _begin(folder: RunFolder, prepared: Prepared, conditions: dict[str, Any], *, again: bool) -> None:
    """Write what a run begins with; request.json first, since it says that the folder is a run's. The conditions of one
    that goes on are those it began under."""
    folder.path.mkdir(parents=True, exist_ok=True)
    write_json(folder.request, identity(prepared))
    write_text(folder.recipe, recipes.save(prepared.request.recipe))
    if not (again and folder.environment.exists()):
        write_json(folder.environment, conditions)


def _leave(prepared: Prepared, folder: RunFolder, scores: dict[str, Any]) -> None:
    """Write what a finished run holds; scores.json last, since it says that the rest is there."""

    def save_student(place: Path) -> None:
        with quiet():
            prepared.student.save_pretrained(place)
            prepared.tokenizer.save_pretrained(place)
        (place / "README.md").write_text(_card(prepared, scores), encoding="utf8")

    write_folder(folder.student, save_student)
    _leave_beside(prepared.distillers[-1], folder.aligners())
    write_json(folder.scores, scores)
    _tidy(folder)


def _card(prepared: Prepared, scores: dict[str, Any]) -> str:
    recipe, base = prepared.request.recipe, prepared.request.teacher or prepared.request.student
    return model_card(
        recipe.plain(),
        scores,
        citations(recipe.name),
        kind=KINDS[prepared.task.kind],
        base_model=base if base and not Path(base).exists() else None,
        pairs=prepared.pairs,
        own_code=prepared.student.is_remote_code(),
    )


def _leave_beside(distiller: Distiller, file: Path) -> None:
    """Keep what a stage trained beside the student and may be of use without it, if anything."""
    beside = {
        f"{name}.{key}": value
        for name, term in distiller.terms.items()
        for key, value in term.state_dict().items()
        if not key.startswith(term.passing)
    }
    if beside:
        write_file(file, lambda place: save_file(gathered(beside), place))


def _tidy(folder: RunFolder) -> None:
    """What is left to do once the scores are there."""
    write_report([folder.path], folder.report)
    Checkpoints(folder.checkpoints).clear()


def citations(name: str) -> list[str]:
    """The BibTeX entries on a recipe's card."""
    card = recipes.card(name.partition(":")[0]) or ""
    return [entry.strip() for entry in re.findall(r"```bibtex\n(.*?)```", card, flags=re.DOTALL)]


def environment() -> dict[str, Any]:
    """What the run ran on."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    found["limbeck"] = __version__
    for package in ("torch", "transformers", "accelerate", "numpy"):
        found[package] = version(package)
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found["threads"] = torch.get_num_threads()
    program = Path(sys.argv[0]).name
    found["command"] = shlex.join(["limbeck" if program == "__main__.py" else program, *sys.argv[1:]])
    return found


def _check_folder(folder: RunFolder, resume: bool) -> None:
    check_place(folder.path, "--out")
    if not folder.path.exists() or (folder.path.is_dir() and not any(_there(folder.path))):
        return
    if not folder.request.exists():
        raise LimbeckError(f'--out "{folder.path}" holds something that is no run. Give an empty or new folder.')
    if not resume:
        how = "Delete it first" if folder.finished else "Add --resume to go on with it"
        state = "a finished run" if folder.finished else "a run that is not finished"
        raise LimbeckError(f'--out "{folder.path}" holds {state}. {how}, or give another folder.')


def _there(path: Path) -> Iterable[Path]:
    """What lies in a folder, but for what a killed run was writing."""
    return (place for place in path.iterdir() if place.suffix != ".tmp")


def _summary(scores: dict[str, Any], folder: RunFolder) -> str:
    ran = f"in {clock(scores['seconds']['total'])}; the student is in {folder.student}, its report is {folder.report}"
    if scores["student"] is None:
        return f"done {ran}"
    share = f"{scores['retention']:.1f} % of the teacher's" if (scores["retention"] or 0) > 0 else ""
    if share and scores["metric"] in scores["lower"]:
        share = "less is better; the teacher's is"
    kept = f" ({share} {scores['teacher']:.2f})" if share else ""
    return f"{scores['metric']} {scores['student']:.2f} on {scores['split']}{kept}, {ran}"


def _listed(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
