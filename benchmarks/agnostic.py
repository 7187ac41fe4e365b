"""How good students are that were distilled on running text alone, with no task in sight, then fine-tuned on tasks.

    python benchmarks/agnostic.py --model MODEL --text wiki.txt --data glue/ --results docs/results/NAME

A student of some of the model's layers is distilled on the text by each recipe, from the same start, with the same
steps, batch, learning rate and β and ε of AdamW, comparing the last layer alone. Each is then fine-tuned on each task,
with several seeds. `start` is the same student not distilled, `model` the model itself. The best fine-tuning rate of a
grid, by the mean over seeds on the dev set, is each row's: as in the papers, it is a choice made on the scores shown.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from pathlib import Path

from comparison import limbeck_in, save, seeds, spread, words

RECIPES = ["hid-seq", "att-mse", "att-kl:val-kl", "minilmv2"]


def main() -> None:
    args = arguments()
    work = Path(args.work)
    began = time.time()
    rows, losses, table = [], {}, ""
    save_start(work, args)
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        for recipe, found in pool.imap_unordered(distilled, [(recipe, work, args) for recipe in args.recipes]):
            losses[recipe] = found
            print(
                f"{time.time() - began:6.0f} s  {recipe}  loss {found['first']:.3g} → {found['held out']:.3g}",
                flush=True,
            )
        jobs = [
            (start, task, lr, seed, work, args)
            for start in [*args.recipes, "start", "model"]
            for task in args.tasks
            for lr in args.rates
            for seed in args.seeds
        ]
        for row in pool.imap_unordered(tuned, jobs):
            rows.append(row)
            print(f"{time.time() - began:6.0f} s  {row['run']}  {row['metric']} {row['student']:.2f}", flush=True)
            table = write(rows, losses, args, time.time() - began)  # each time: what is stopped keeps what it has
    print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the model to distil")
    parser.add_argument("--text", required=True, help="running text: a file, a folder or a pattern")
    parser.add_argument("--data", required=True, help="folder of GLUE's TSV files")
    parser.add_argument("--recipes", type=words, default=RECIPES)
    parser.add_argument("--tasks", type=words, default=["rte", "mrpc", "stsb"])
    parser.add_argument("--seeds", type=seeds, default=[1, 2])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--init", default="layers(uniform)", help="how the student starts")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", default="3e-4")
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--epochs", type=float, default=5, help="of fine-tuning")
    parser.add_argument("--rates", type=words, default=["5e-5"], help="of fine-tuning, a grid")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--work", default="runs/agnostic", help="where the run folders go")
    parser.add_argument("--results", required=True, help="writes RESULTS.json and RESULTS.md")
    return parser.parse_args()


def save_start(work: Path, args: argparse.Namespace) -> None:
    """Leave the student as it starts: fine-tuned like the others, it tells what distilling added."""
    from limbeck.data.spec import DataSpec
    from limbeck.folder import write_folder
    from limbeck.models import quiet
    from limbeck.prepare import prepare
    from limbeck.request import request

    place = folder(work, "start")
    if place.exists():
        return
    data = DataSpec(kind="text", train=args.text, max_length=args.max_length)
    asked = request(args.recipes[0], data, teacher=args.model, layers=args.layers, set=alike(args))
    prepared = prepare(asked)  # which packs the text, for the recipes too

    def save(new: Path) -> None:
        prepared.student.save_pretrained(new)
        prepared.tokenizer.save_pretrained(new)

    with quiet():
        write_folder(place, save)


def alike(args: argparse.Namespace) -> list[str]:
    """What every recipe has in common."""
    paces = {"steps": args.steps, "batch": args.batch, "lr": args.lr, "betas": [0.9, 0.999], "eps": 1e-8}
    return [f"init=[{args.init}]", *(f"stages.*.{name}={value}" for name, value in paces.items())]


def distilled(job: tuple) -> tuple[str, dict]:
    """Distil by one recipe, or go on with it, and return its losses."""
    recipe, work, args = job
    limbeck = limbeck_in(args.workers)
    run = limbeck.distill(
        recipe,
        teacher=args.model,
        layers=args.layers,
        set=alike(args),
        kind="text",
        train=args.text,
        max_length=args.max_length,
        out=folder(work, recipe),
        resume=True,
        quiet=True,
        pace=limbeck.Pace(save_every=1e9),
    )
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text("utf8").splitlines()]
    first = next(line["loss"] for line in lines if "loss" in line)
    return recipe, {"first": first, "held out": run.scores["student"], "seconds": run.scores["seconds"]["total"]}


def tuned(job: tuple) -> dict:
    """Fine-tune one student on one task, or go on with it, and return its scores."""
    start, task, lr, seed, work, args = job
    limbeck = limbeck_in(args.workers)
    run = limbeck.finetune(
        args.model if start == "model" else folder(work, start),
        set=[f"stages.*.epochs={args.epochs}", f"stages.*.lr={lr}"],
        task=task,
        data=args.data,
        seed=seed,
        out=work / f"{start}-{task}-{lr}-{seed}".replace(":", "-"),
        resume=True,
        quiet=True,
        pace=limbeck.Pace(save_every=1e9),
    )
    kept = ("metric", "student", "metrics", "params", "seed", "seconds")
    told = {"run": f"{start} {task} {lr} {seed}", "start": start, "task": task, "lr": lr}
    return told | {name: run.scores[name] for name in kept}


def folder(work: Path, recipe: str) -> Path:
    return work / recipe.replace(":", "-")


def write(rows: list[dict], losses: dict, args: argparse.Namespace, seconds: float) -> str:
    """Leave the raw rows and the table, and return the table."""
    rows.sort(key=lambda row: (row["task"], row["start"], row["lr"], row["seed"]))
    settings = {k: v for k, v in vars(args).items() if k not in ("work", "results", "data", "model", "text")}
    settings |= {name: Path(getattr(args, name)).name for name in ("model", "text")}
    header = ["student", *args.tasks, "mean", "loss: first, held out"]
    data = {"settings": settings, "seconds": round(seconds), "losses": losses, "rows": rows}
    return save(args.results, header, lines(rows, losses, args), **data)


def lines(rows: list[dict], losses: dict, args: argparse.Namespace):
    """A line a student: mean ± standard deviation over seeds, at its best rate, task by task."""
    for start in ["model", "start", *args.recipes]:
        best = [max((scores(rows, start, task, lr) for lr in args.rates), key=mean) for task in args.tasks]
        if all(best):
            loss = f"{losses[start]['first']:.3g}, {losses[start]['held out']:.3g}" if start in losses else ""
            yield [start, *map(spread, best), f"{mean([mean(found) for found in best]):.1f}", loss]


def scores(rows: list[dict], start: str, task: str, lr: str) -> list[float]:
    return [row["student"] for row in rows if (row["start"], row["task"], row["lr"]) == (start, task, lr)]


def mean(found: list[float]) -> float:
    return statistics.mean(found) if found else float("-inf")


if __name__ == "__main__":
    main()
