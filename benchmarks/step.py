"""What a training step costs: milliseconds, examples a second, memory, and the share of the hardware's limit.

    python benchmarks/step.py                                             # on CPU: small shapes, a minute
    python benchmarks/step.py --data glue/ --lengths mrpc,sst2 --batch 8,32 --recipes finetune,kd,pkd --results FILE

BERT-base 12 → 6 with random weights on CUDA; a smaller pair on CPU. Recipes on the same batches in the same mode are
timed in turns, and each keeps its fastest. The hardware's limit is a matrix product measured in the same run.
"""

import argparse
import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from workload import Workload, examples, lengths_of, teacher

from limbeck.engine.world import open_world
from limbeck.report.tables import markdown
from limbeck.run import environment
from limbeck.teachers import Live

TURNS = 3


def main() -> None:
    args = arguments()
    accelerator = open_world()
    cuda = accelerator.device.type == "cuda"
    model = teacher() if cuda else teacher(4, 256)
    layers = 6 if cuda else 2
    limit = matrix_rate(accelerator.device)
    rows = []
    for lengths in args.lengths:
        for batch in args.batch:
            data = examples(lengths_of(lengths, args.data, args.steps * batch))
            for mode in args.modes if cuda else ["eager"]:
                for row in in_turns(args.recipes, model, data, batch, layers, mode, accelerator):
                    flops = row.pop("flops")
                    row |= {"limit_share": flops / (row["ms"] / 1000) / limit}
                    rows.append({"lengths": lengths, "batch": batch, "mode": mode} | row)
                    print(rows[-1], flush=True)
    table = markdown(
        ["recipe", "lengths", "batch", "mode", "ms a step", "× first", "examples/s", "peak GiB", "share of limit"],
        [
            [
                row["recipe"],
                row["lengths"],
                str(row["batch"]),
                row["mode"],
                f"{row['ms']:.2f}",
                f"{row['times_first']:.2f}",
                f"{row['examples_per_s']:.0f}",
                f"{row['peak_gib']:.2f}",
                f"{row['limit_share']:.1%}",
            ]
            for row in rows
        ],
    )
    print(table)
    if args.results:
        machine = {k: v for k, v in environment().items() if k != "command"}
        result = {"environment": machine, "matrix_tflops": limit / 1e12, "rows": rows}
        Path(args.results).write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", type=words, default=["finetune", "kd", "pkd", "lwd", "rail-kd-l"])
    parser.add_argument("--lengths", type=words, default=["32"], help="GLUE tasks (with --data) or numbers")
    parser.add_argument("--batch", type=lambda text: [int(b) for b in words(text)], default=[32])
    parser.add_argument(
        "--modes",
        type=words,
        default=["eager", "captured", "captured cached"],
        help="words out of: eager, captured, compiled, cached; modes are separated by commas",
    )
    parser.add_argument("--steps", type=int, default=24, help="steps timed, of all shapes")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--results")
    return parser.parse_args()


def in_turns(recipes, model, data, batch, layers, mode, accelerator) -> Iterator[dict]:
    """A row a recipe: the fastest of some epochs, after those in which every shape was seen and captured."""
    ready, peaks = {}, {}
    for recipe in recipes:
        ready[recipe], peaks[recipe] = warmed(recipe, model, data, batch, layers, mode, accelerator)
    times: dict[str, list[float]] = {recipe: [] for recipe in recipes}
    for _ in range(TURNS):
        for recipe, work in ready.items():
            wait(accelerator.device)
            began = time.perf_counter()
            steps = work.run(0)
            wait(accelerator.device)
            times[recipe].append(1000 * (time.perf_counter() - began) / steps)
    for recipe, work in ready.items():
        captures, best = work.step.captures, min(times[recipe])
        yield {
            "recipe": recipe,
            "ms": best,
            "turns": times[recipe],
            "times_first": best / min(times[recipes[0]]),
            "examples_per_s": 1000 * batch / best,
            "peak_gib": peaks[recipe],
            "loss": work.step.read()["loss"],
            "refused": list(captures.refused.values()) if captures else None,
            "flops": step_flops(work, model, layers),
        }


def warmed(recipe, model, data, batch, layers, mode, accelerator) -> tuple[Workload, float]:
    """A workload that has seen every shape, captured if it is to be, and the memory that took, in GiB."""
    cuda = accelerator.device.type == "cuda"
    start = ("init=[layers(first)]",) if recipe == "finetune" else ()
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated() if cuda else 0
    how = {word: word in mode for word in ("eager", "compiled", "cached")}
    work = Workload(recipe, model, data, batch, layers=layers, accelerator=accelerator, set=start, **how)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for epoch in range(2 if cuda else 1):
        work.run(epoch)
    return work, (torch.cuda.max_memory_allocated() - held) / 2**30 if cuda else 0.0


def step_flops(work: Workload, model, layers: int) -> float:
    """Products a step needs: the teacher's forward, and three times the student's, on the tokens there are."""
    width = model.config.hidden_size
    tokens = work.data.lengths.mean() * work.stage.batch
    attention = 4 * work.data.lengths.mean() * width
    block = 24 * width**2 + attention  # floating-point operations a token
    live = work.distiller.teacher
    above = live.tap.depth if isinstance(live, Live) else 0  # a cached one runs no more
    return float(tokens * block * (above + 3 * layers))


def matrix_rate(device: torch.device, size: int = 8192) -> float:
    """Floating-point operations a second of a large product, in the precision models run in."""
    cuda = device.type == "cuda"
    size = size if cuda else 1024
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32) for _ in "ab")
    for _ in range(3):
        a @ b
    wait(device)
    began = time.perf_counter()
    for _ in range(10):
        a @ b
    wait(device)
    return 10 * 2 * size**3 / (time.perf_counter() - began)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


if __name__ == "__main__":
    main()
