"""The command line: one short function a command, no logic.

torch is imported inside the commands that need it, so that help comes at once.
"""

import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from limbeck.errors import LimbeckError

app = typer.Typer(
    name="limbeck",
    help="Turn a large transformer into a small one that keeps its quality.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
out = Console(highlight=False, soft_wrap=True)
error = Console(stderr=True, highlight=False, soft_wrap=True)

DATA, TRAINING, STUDENT = "The data", "How to train", "The models"


def _option(names: str, help: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names.split(), help=help, rich_help_panel=panel, **more)


@dataclass
class Source:
    """Options that say where data come from, and how files of one's own are read."""

    text: Annotated[
        str | None, _option("--text", "The column with the text; guessed and shown if not given.", DATA)
    ] = None
    text_pair: Annotated[str | None, _option("--text-pair", "The column with the second text.", DATA)] = None
    label: Annotated[str | None, _option("--label", "The column with the label.", DATA)] = None
    labels: Annotated[str | None, _option("--labels", "The label names in order: no,yes.", DATA)] = None
    kind: Annotated[
        str | None,
        _option(
            "--kind",
            "What is learnt, where files do not show it: multi-label, tagging, question-answering, seq2seq, causal-lm, "
            "masked-lm, text, …",
            DATA,
        ),
    ] = None
    max_length: Annotated[
        int | None,
        _option("--max-length", "Tokens of an example, or a block of text: 128 or, with a context, 384 at most.", DATA),
    ] = None
    stride: Annotated[
        int, _option("--stride", "Tokens that two windows of a context share, where it has to be cut.", DATA)
    ] = 128
    task: Annotated[str | None, _option("--task", "A GLUE task: cola, sst2, mrpc, stsb, qqp, mnli, …", DATA)] = None
    data: Annotated[
        str | None, _option("--data", "Folder of the official TSV files, or the id of a dataset on the hub.", DATA)
    ] = None


@dataclass
class Scored(Source):
    """Options that say what to score on."""

    eval: Annotated[
        str | None, _option("--eval", "Your own file: CSV, TSV, JSONL, Parquet, SQuAD's JSON, or text.", DATA)
    ] = None


@dataclass
class Data(Source):
    """Options that say what to learn from."""

    train: Annotated[
        str | None, _option("--train", "Your own file: CSV, TSV, JSONL, Parquet, SQuAD's JSON, or text.", DATA)
    ] = None
    eval: Annotated[str | None, _option("--eval", "The file to select on; without it, a tenth is held out.", DATA)] = (
        None
    )
    test: Annotated[str | None, _option("--test", "A file to score on at the end.", DATA)] = None
    few: Annotated[int | None, _option("--few", "Train on this many examples, drawn by the seed.", DATA)] = None
    label_noise: Annotated[
        float | None, _option("--label-noise", "Flip this share of the train labels: 0.3.", DATA)
    ] = None
    supplement: Annotated[
        str | None,
        _option("--supplement", "Other data, a task or a file, for stages that compare layers alone.", DATA),
    ] = None


@dataclass
class Models:
    """Options that say which models meet."""

    teacher: Annotated[
        str | None, _option("--teacher", "The model to distil: a hub id, a folder or a run folder.", STUDENT)
    ] = None
    layers: Annotated[
        int | None, _option("--layers", "How many layers the student has; without it, half the teacher's.", STUDENT)
    ] = None
    decoder_layers: Annotated[
        int | None, _option("--decoder-layers", "How many its decoder has, if not as many as its encoder.", STUDENT)
    ] = None
    side: Annotated[
        str | None, _option("--side", "Whose layers are compared beside an encoder: decoder, encoder, both.", STUDENT)
    ] = None
    width: Annotated[int | None, _option("--width", "The student's width; needs a random start.", STUDENT)] = None
    student: Annotated[
        str | None, _option("--student", "A checkpoint to start from instead of the teacher's layers.", STUDENT)
    ] = None


@dataclass
class Change:
    """Options that change a recipe."""

    seed: Annotated[int, _option("--seed", "Everything random follows from it.", TRAINING)] = 42
    set: Annotated[
        list[str] | None,
        _option("--set", "Change a value of the recipe: stages.distil.lr=5e-5. Stage `*` is every one.", TRAINING),
    ] = None
    epochs: Annotated[float | None, _option("--epochs", "Short for --set stages.*.epochs=…", TRAINING)] = None
    lr: Annotated[float | None, _option("--lr", "Short for --set stages.*.lr=…", TRAINING)] = None
    batch: Annotated[int | None, _option("--batch", "Short for --set stages.*.batch=…", TRAINING)] = None
    allow_code: Annotated[
        bool, _option("--allow-code", "Let the recipe name Python functions by dotted path.", TRAINING)
    ] = False

    def overrides(self) -> list[str]:
        """The shortcuts, then what --set says."""
        short = {"epochs": self.epochs, "lr": self.lr, "batch": self.batch}
        return [f"stages.*.{key}={value}" for key, value in short.items() if value is not None] + (self.set or [])

    def options(self) -> dict[str, Any]:
        """As distill and finetune take them."""
        return {"seed": self.seed, "set": self.overrides(), "allow_code": self.allow_code}


@dataclass
class Going:
    """Options that change how a run goes, not what it learns."""

    out: Annotated[Path, _option("--out", "The run folder to write.")]
    resume: Annotated[bool, _option("--resume", "Go on where a killed run stopped, exactly.", TRAINING)] = False
    micro_batch: Annotated[
        int | None, _option("--micro-batch", "Examples at once on a device; the rest is accumulated.", TRAINING)
    ] = None
    save_every: Annotated[float, _option("--save-every", "Seconds between checkpoints.", TRAINING)] = 60.0
    log_every: Annotated[int, _option("--log-every", "Steps between lines of metrics.jsonl.", TRAINING)] = 10
    cache: Annotated[
        str, _option("--cache", "The teacher's answers: off, auto (in memory), or a folder to keep them.", TRAINING)
    ] = "auto"
    eager: Annotated[bool, _option("--eager", "Do not capture steps as CUDA graphs.", TRAINING)] = False
    compile: Annotated[
        str,
        _option(
            "--compile", "Blocks by torch.compile on a GPU: off, auto (in long stages, if it is faster), on.", TRAINING
        ),
    ] = "auto"
    precision: Annotated[
        str,
        _option(
            "--precision",
            "What models run in: fp32, bf16, or auto, which is bf16 on a GPU and fp32 on a CPU. What is trained is "
            "kept in fp32.",
            TRAINING,
        ),
    ] = "auto"
    shard: Annotated[
        bool, _option("--shard", "Cut student and teacher over the processes of torchrun (FSDP2).", TRAINING)
    ] = False
    recompute: Annotated[
        bool, _option("--recompute", "Keep no activations in the student's blocks: less memory, more time.", TRAINING)
    ] = False
    deepspeed: Annotated[
        str | None, _option("--deepspeed", "A DeepSpeed configuration (JSON), carried out by torch.", TRAINING)
    ] = None
    track: Annotated[
        str | None, _option("--track", "Also log to tensorboard, wandb, … (any tracker of Accelerate).", TRAINING)
    ] = None
    quiet: Annotated[bool, _option("--quiet", "Only errors.")] = False

    def options(self) -> dict[str, Any]:
        """As distill and finetune take them."""
        from limbeck.engine.loop import Pace

        pace = Pace(**{field.name: getattr(self, field.name) for field in fields(Pace)})
        own = {name: getattr(self, name) for name in ("out", "resume", "track", "deepspeed", "quiet")}
        return {**own, "pace": pace}


DEBUG = _option("--debug", "Show the traceback of an error.")


def takes(**groups: type) -> Callable[[Callable], Callable]:
    """Give a command the options of each group; each group arrives as one argument."""

    def decorate(command: Callable) -> Callable:
        own = [p for p in inspect.signature(command).parameters.values() if p.name not in groups]
        given = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, annotation=f.type, default=_default(f))
            for group in groups.values()
            for f in fields(group)
        ]
        debug = inspect.Parameter(
            "debug", inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[bool, DEBUG], default=False
        )

        @wraps(command)
        def run(debug: bool, **values: Any) -> None:
            filled = {
                name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in groups.items()
            }
            try:
                command(**values, **filled)
            except KeyboardInterrupt:  # left to typer, it would end without a word
                again = " The same command with --resume goes on from the last checkpoint." if "going" in filled else ""
                error.print(f"limbeck: interrupted.{again}")
                raise typer.Exit(130) from None

        parameters = [*own, *given, debug]
        parameters.sort(key=lambda p: p.default is not inspect.Parameter.empty)
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        )
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _default(field: Any) -> Any:
    from dataclasses import MISSING

    return inspect.Parameter.empty if field.default is MISSING else field.default


def _show_version(asked: bool) -> None:
    if asked:
        from limbeck import __version__

        out.print(f"limbeck {__version__}")
        raise typer.Exit


@app.callback()
def limbeck(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Turn a large transformer into a small one that keeps its quality."""


@app.command()
@takes()
def demo(
    folder: Annotated[Path, _option("--out", "Where to leave everything.")] = Path("runs/demo"),
) -> None:
    """Everything on generated data: train a small teacher, distil it five ways, show the table and the page."""
    from limbeck.demo import run_demo

    run_demo(folder, out)


@app.command()
@takes(data=Data, change=Change, going=Going)
def finetune(
    model: Annotated[str, _option("--model", "The model to fine-tune: a hub id, a folder or a run folder.")],
    data: Data,
    change: Change,
    going: Going,
    layers: Annotated[int | None, _option("--layers", "Keep only its first layers.")] = None,
    grid: Annotated[
        list[str] | None,
        _option("--grid", "Values to try: lr=1e-5,3e-5; every combination is a run folder in --out.", TRAINING),
    ] = None,
) -> None:
    """Make a teacher, or a baseline: `limbeck finetune --model M --task rte --data glue/ --out runs/teacher`.

    With `--grid lr=1e-5,3e-5 --grid batch=16,32` every combination is tried and the best is named; `--grid seed=1,2`
    takes the mean over seeds, and a path as for `--set` is tried likewise. With `--resume`, what is finished stays.
    """
    options = {"layers": layers, **change.options(), **going.options(), **asdict(data)}
    if grid:
        from limbeck.grid import named, run_grid, shown

        cells = run_grid(model, grid, **options)
        out.print(shown(cells), soft_wrap=False)
        out.print(named(cells))
    else:
        from limbeck.run import finetune as run

        run(model, **options)


RECIPE = typer.Argument(help="A shipped recipe (`limbeck recipes`), one of its variants (`pkd:last`), or a YAML file.")


@app.command()
@takes(models=Models, data=Data, change=Change, going=Going)
def distill(recipe: Annotated[str, RECIPE], models: Models, data: Data, change: Change, going: Going) -> None:
    """The main job: `limbeck distill pkd --teacher T --layers 6 --task rte --data glue/ --out runs/rte`."""
    from limbeck.run import distill as run

    run(recipe, **asdict(models), **change.options(), **going.options(), **asdict(data))


@app.command()
@takes(models=Models, data=Data, change=Change)
def check(
    recipe: Annotated[str, RECIPE],
    models: Models,
    data: Data,
    change: Change,
    as_json: Annotated[bool, _option("--json", "Print JSON.")] = False,
) -> None:
    """What a run would do, from one tiny forward and backward: layers, widths, what trains, each part, cost."""
    from limbeck.check import examine, shown
    from limbeck.data.spec import DataSpec
    from limbeck.prepare import prepare
    from limbeck.recipe import task_values, variant_tasks, variant_values
    from limbeck.request import request

    asked = request(recipe, DataSpec.named(**asdict(data)), **asdict(models), **change.options())
    task = asked.data.task_name
    changes = variant_values(recipe, task), variant_tasks(recipe)
    report = examine(prepare(asked), task_values(recipe, task), *changes)
    out.print_json(data=report.plain()) if as_json else out.print(shown(report), soft_wrap=False)


@app.command()
@takes(data=Scored)
def evaluate(
    model: Annotated[list[str], typer.Argument(help="Models: the teacher first, then its students.")],
    data: Scored,
    predictions: Annotated[Path | None, _option("--predictions", "Write what each model answers, as JSONL.")] = None,
    as_json: Annotated[bool, _option("--json", "Print JSON.")] = False,
) -> None:
    """Scores, size, latency, agreement with the first model: `limbeck evaluate TEACHER STUDENT --task rte --data …`."""
    from limbeck.compare import compare, shown
    from limbeck.data.spec import DataSpec

    rows = compare(model, DataSpec.named(**asdict(data)), predictions, partial(error.print, markup=False))
    out.print_json(data=rows) if as_json else out.print(shown(rows), soft_wrap=False, crop=False)


@app.command()
@takes()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    page: Annotated[
        Path | None, _option("--out", "The page; without it, report.html in the folder of all runs.")
    ] = None,
) -> None:
    """One self-contained HTML page about one run or several; those that differ by the seed alone get a mean."""
    from limbeck.report.page import write_report

    common = os.path.relpath(os.path.commonpath([run.absolute() for run in runs]))
    out.print(str(write_report(runs, page or Path(common, "report.html"))))


@app.command()
@takes()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Show the card of this recipe.")] = None,
    papers: Annotated[bool, _option("--pairs", "List the papers' pairs of models and the commands to type.")] = False,
    as_json: Annotated[bool, _option("--json", "Print JSON.")] = False,
) -> None:
    """List the methods; with a NAME, show its card and its recipe."""
    from limbeck import recipe as book
    from limbeck.pairs import pairs

    known: Any = pairs(name) if papers else book.listed() if name is None else book.described(name)
    if as_json:
        out.print_json(data=known)
    elif papers:
        for pair in known:
            out.print(f"{pair['paper']}, {pair['sizes']}:", *pair["commands"], "", sep="\n", markup=False)
    elif name:
        out.print(Markdown(f"{known['card']}\n## As YAML\n```yaml\n{known['yaml']}```"), soft_wrap=False)
    else:
        table = Table("recipe", "variants", "what it does")
        for one in known:
            table.add_row(one["name"], ", ".join(one["variants"]), one["about"])
        out.print(table, soft_wrap=False)


def main() -> None:
    """Run a command; a user's mistake is one paragraph and status 2, a failure is one line and status 1."""
    debug = "--debug" in sys.argv
    try:
        app()
    except SystemExit:  # how every command ends that was carried out
        if "torch" in sys.modules:  # most commands do not need it
            from limbeck.engine.world import close_world

            close_world()
        raise
    except LimbeckError as mistake:
        if debug:
            raise
        error.print(f"limbeck: {mistake}", markup=False)
        sys.exit(2)
    except Exception as failure:
        if debug:
            raise
        what = json.dumps(str(failure))[1:-1] or type(failure).__name__
        error.print(f"limbeck: failed: {type(failure).__name__}: {what} (--debug shows where)", markup=False)
        sys.exit(1)
