"""Whether batches of like lengths learn as well as batches drawn at random: dev scores of both, over seeds.

    python benchmarks/buckets.py --model MODEL --data glue/ --tasks mrpc,stsb --results benchmarks/results/buckets.json

Fine-tunes MODEL with the plan limbeck uses (sorted by length inside shuffled windows, padded to a bucket) and with
plain shuffled batches padded to the longest text that occurs. Everything else is the same, the number of steps
included.
"""

import argparse
import json
import multiprocessing
import os
import statistics
from pathlib import Path

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="folder of GLUE's TSV files")
    parser.add_argument("--tasks", default="mrpc,stsb")
    parser.add_argument("--seeds", default="1,2,3,4")
    parser.add_argument("--epochs", default="5")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--work", default="runs/buckets")
    parser.add_argument("--results")
    args = parser.parse_args()
    jobs = [
        (task, plan, int(seed), args)
        for task in args.tasks.split(",")
        for plan in ("buckets", "plain")
        for seed in args.seeds.split(",")
    ]
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        rows = list(pool.imap(one, jobs))
    report(rows, args)


def plain(lengths: np.ndarray, batch: int, *, seed: int, stage: int, epoch: int, longest: int) -> list:
    """Shuffled, and no more."""
    from limbeck.data.plan import FILL, PlannedBatch

    order = np.random.default_rng([seed, stage, epoch]).permutation(len(lengths))
    filled = np.concatenate([order, np.full(-len(order) % batch, FILL)]).reshape(-1, batch)
    return [PlannedBatch(ids, int(lengths.max())) for ids in filled]


def one(job: tuple) -> dict:
    """One run with one of the plans."""
    task, planned, seed, args = job
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import limbeck
    from limbeck.data import plan
    from limbeck.engine import loop

    loop.plan = plain if planned == "plain" else plan.plan  # a worker may have run the other before
    out = Path(args.work) / f"{task}-{planned}-{seed}"
    same = [f"stages.*.epochs={args.epochs}", "stages.*.lr=5e-5", "stages.*.batch=32"]
    run = limbeck.finetune(args.model, task=task, data=args.data, out=out, seed=seed, set=same, quiet=True)
    return {
        "task": task,
        "plan": planned,
        "seed": seed,
        "metric": run.scores["metric"],
        "score": run.scores["student"],
        "seconds": run.scores["seconds"]["per_stage"],
    }


def report(rows: list[dict], args: argparse.Namespace) -> None:
    """A table of means and deviations, and the raw rows."""
    from limbeck.report.tables import markdown
    from limbeck.run import environment

    cells = []
    for task in args.tasks.split(","):
        found = {p: [r["score"] for r in rows if (r["task"], r["plan"]) == (task, p)] for p in ("buckets", "plain")}
        cells.append([task, *(f"{statistics.mean(s):.2f} ± {statistics.stdev(s):.2f}" for s in found.values())])
    print(markdown(["dev score, mean ± sd over seeds", "like lengths", "plain batches"], cells))
    if args.results:
        machine = {k: v for k, v in environment().items() if k != "command"}
        settings = {"model": Path(args.model).name, "epochs": args.epochs, "seeds": args.seeds}
        result = {"environment": machine, "settings": settings, "rows": rows}
        Path(args.results).write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
