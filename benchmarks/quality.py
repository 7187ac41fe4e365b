"""How good every recipe is: recipes × tasks × seeds on one teacher a task, with equal steps, as a table and JSON.

    python benchmarks/quality.py --model MODEL --data glue/ --tasks rte,mrpc --layers 3 --results docs/results/NAME
    python benchmarks/quality.py --model MODEL --train train-v1.1.json --eval dev-v1.1.json --recipes kd,lwd,ted …

A teacher is fine-tuned for each task, then each recipe distils it with the same number of steps, batch, learning rate
and β and ε of AdamW into a student that starts as the teacher's lower layers, so that recipes differ by method alone;
with `--own-start` a student starts as its recipe says. A recipe of several stages shares the steps out evenly among
them; a stage that trains no student keeps its learning rate. `finetune` starts as the others do and sees labels only.
Scores are those of the best epoch of the last stage on the dev set.
"""

import argparse
import gc
import json
import multiprocessing
import statistics
import time
import traceback
from pathlib import Path

from comparison import limbeck_in, numbers, save, seeds, spread, words


def main() -> None:
    args = arguments()
    work, began, rows = Path(args.work), time.time(), []

    def keep(row: dict) -> None:
        print(f"{time.time() - began:6.0f} s  {said(row)}", flush=True)
        if "error" not in row:
            rows.append(row)
            write(rows, args, time.time() - began)  # each time: a stopped comparison keeps what it has

    def teacher(task: str) -> tuple:
        return "teacher", task, args.teacher_seed, args.model, None, work / f"teacher-{task}", args

    def student(recipe: str, task: str, seed: int) -> tuple:
        folder = work / f"{recipe}-{task}-{seed}"
        return recipe, task, seed, str(work / f"teacher-{task}"), args.layers, folder, args

    with multiprocessing.get_context("spawn").Pool(args.workers, maxtasksperchild=None) as pool:
        ready = {task: pool.apply_async(attempt, [teacher(task)], callback=keep) for task in args.tasks}
        waiting = []
        for task in args.tasks:
            ready[task].wait()
            jobs = [student(recipe, task, seed) for recipe in args.recipes for seed in args.seeds]
            waiting += [pool.apply_async(attempt, [job], callback=keep) for job in jobs]
        for result in waiting:
            result.wait()
        pool.close()
        pool.join()
    print(write(rows, args, time.time() - began))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the pre-trained model the teachers start from")
    parser.add_argument("--data", help="folder of GLUE's TSV files")
    parser.add_argument("--tasks", type=words, default=["rte", "mrpc"])
    parser.add_argument("--train", help="a file of any kind of task, in place of --data and --tasks")
    parser.add_argument("--eval", help="the file to score on, which goes with --train")
    parser.add_argument("--max-length", type=int)
    parser.add_argument("--recipes", type=words, help="default: every shipped recipe and pkd:last")
    parser.add_argument("--seeds", type=seeds, default=[1, 2, 3])
    parser.add_argument("--teacher-seed", type=int, default=42)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--epochs", type=numbers, default=[10.0], help="of all tasks, or of each: 10,10,5")
    parser.add_argument("--lr", default="5e-5")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--own-start", action="store_true", help="students start as their recipes say")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="changes all recipes")
    parser.add_argument("--precision", default="auto", help="bf16 on a CPU that has instructions for it")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--work", default="runs/quality", help="where the run folders go")
    parser.add_argument("--results", required=True, help="writes RESULTS.json and RESULTS.md")
    args = parser.parse_args()
    if bool(args.data) == bool(args.train) or bool(args.train) != bool(args.eval):
        parser.error("give --data with --tasks, or --train with --eval")
    if args.train:
        args.tasks = [Path(args.train).stem]
    if len(args.epochs) not in (1, len(args.tasks)):
        parser.error("give --epochs once, or as many as there are tasks")
    if not args.recipes:
        from limbeck.recipe import shipped

        args.recipes = ["finetune", *(name for name in shipped() if name != "finetune"), "pkd:last"]
    return args


def attempt(job: tuple) -> dict:
    """One run's scores, or why it failed: the others go on."""
    try:
        return one(job)
    except Exception as problem:
        traceback.print_exc()
        return {"run": " ".join(map(str, job[:3])), "error": str(problem)}


def said(row: dict) -> str:
    return f"{row['run']}  " + (row["error"] if "error" in row else f"{row['metric']} {row['student']:.2f}")


def one(job: tuple) -> dict:
    """Carry out one run, or go on with it, and return its scores."""
    recipe, task, seed, model, layers, folder, args = job
    limbeck = limbeck_in(args.workers)
    data = {"train": args.train, "eval": args.eval} if args.train else {"task": task, "data": args.data}
    named, epochs = data.get("task"), dict(zip(args.tasks, args.epochs * len(args.tasks)))[task]
    same = alike(recipe, named, epochs, args)
    common = {
        **data, "max_length": args.max_length, "out": str(folder).replace(":", "-"), "seed": seed,
        "resume": True, "quiet": True, "pace": limbeck.Pace(save_every=1e9, precision=args.precision),
    }  # fmt: skip
    done = Path(common["out"]) / "scores.json"
    if done.exists():
        scores = json.loads(done.read_text("utf8"))
    elif recipe in ("teacher", "finetune"):
        scores = limbeck.finetune(model, layers=layers, set=same, **common).scores
    else:
        scores = limbeck.distill(recipe, teacher=model, layers=layers, set=same, **common).scores
    free_memory()
    kept = ("metric", "student", "teacher", "retention", "metrics", "params", "latency_ms", "seed", "seconds")
    found = {"run": f"{recipe} {task} {seed}", "recipe": recipe, "task": task} | {k: scores[k] for k in kept}
    return found | history(Path(common["out"]))


def free_memory() -> None:
    """Leave the GPU's memory to the other workers."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def history(folder: Path) -> dict:
    """Of every stage, the score after each epoch, and the parts of the loss that were logged last."""
    epochs: dict[str, list[float]] = {}
    losses: dict[str, dict] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text("utf8").splitlines()):
        if line.get("eval"):
            epochs.setdefault(line["stage"], []).append(round(next(iter(line["eval"].values())), 2))
        if "loss" in line:
            parts = {k: float(f"{v:.3g}") for k, v in line.items() if k not in ("stage", "epoch", "step", "lr")}
            losses[line["stage"]] = parts
    return {"epochs": epochs, "losses": losses}


def alike(recipe: str, task: str | None, epochs: float, args: argparse.Namespace) -> list[str]:
    """What makes a recipe start as the others do, and take as many steps, of the same size."""
    from limbeck.recipe import resolve

    if recipe == "teacher":
        return [f"stages.*.epochs={epochs}", f"stages.*.lr={args.lr}", f"stages.*.batch={args.batch}"]
    asked = resolve(recipe, task=task)
    start = asked.init if args.own_start and recipe != "finetune" else ["layers(first)", *asked.init[1:]]
    changes = [f"init=[{', '.join(map(str, start))}]", f"stages.*.batch={args.batch}"]
    changes += ["stages.*.betas=[0.9, 0.999]", "stages.*.eps=1e-8"]
    changes += [f"stages.*.epochs={epochs / len(asked.stages)}"]
    changes += [f"stages.{stage.name}.lr={args.lr}" for stage in asked.stages if "student" in stage.train]
    return changes + args.set


def write(rows: list[dict], args: argparse.Namespace, seconds: float) -> str:
    """Leave the raw rows and the table, and return the table."""
    rows.sort(key=lambda row: (row["task"], row["recipe"], row["seed"]))
    settings = {k: v for k, v in vars(args).items() if k not in ("work", "results", "data")}
    settings |= {k: Path(settings[k]).name for k in ("model", "train", "eval") if settings[k]}
    header = ["recipe", *args.tasks, "mean"]
    return save(args.results, header, lines(rows, args), settings=settings, seconds=round(seconds), rows=rows)


def lines(rows: list[dict], args: argparse.Namespace):
    """A line a recipe: mean ± standard deviation over seeds, task by task."""
    for recipe in ["teacher", *args.recipes]:
        scores = [
            [row["student"] for row in rows if row["recipe"] == recipe and row["task"] == task] for task in args.tasks
        ]
        if all(scores):
            yield [recipe, *map(spread, scores), f"{statistics.mean(map(statistics.mean, scores)):.1f}"]


if __name__ == "__main__":
    main()
