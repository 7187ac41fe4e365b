"""How time and memory grow: with the teacher's depth and width, with length, examples and the number of layers matched.

    python benchmarks/growth.py --results benchmarks/results/growth.json

One thing grows at a time from a middle: BERT of 12 layers and width 768 → 6 layers, 64 tokens, batch 32, hidden states
of six layers and logits. `live` runs the teacher at every step, `cached` looks its answers up. On CPU the models are
small, and the numbers say only that the script works.
"""

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path

import torch
import yaml
from workload import Workload, examples, lengths_of, teacher

from limbeck.engine.world import open_world
from limbeck.report.tables import markdown
from limbeck.run import environment

MIDDLE = {"depth": 12, "width": 768, "length": 64, "examples": 1024, "matched": 6}
GROWTH = {
    "depth": [6, 12, 24, 48],
    "width": [256, 512, 768, 1024],
    "length": [32, 64, 128, 256, 512],
    "examples": [1024, 4096, 16384],
    "matched": [1, 2, 4, 6],
}
SMALL = {"depth": 4, "width": 64, "length": 16, "examples": 64, "matched": 2}


def recipe(depth: int, matched: int, student: int) -> dict:
    """Logits, and the last `matched` layers of the student with evenly spaced ones of the teacher."""
    pairs = [[s, s * depth // student] for s in range(student - matched + 1, student + 1)]
    objectives = {
        "layers": {"match": "hidden", "map": f"pairs({pairs})", "distance": "mse"},
        "logits": {"logits": "kl(temperature=2)"},
    }
    return {
        "name": "growth",
        "init": ["layers(first)"],
        "stages": [{"name": "distil", "epochs": 1, "objectives": objectives}],
    }


def measure(model, case: dict[str, int], cached: bool, batch: int, steps: int, accelerator) -> dict:
    """Milliseconds a step, peak memory above what was there, and what building the cache took."""
    cuda = accelerator.device.type == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if cuda else 0
    student = min(6, case["depth"] // 2)
    data = examples(lengths_of(str(case["length"]), None, case["examples"]))
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(recipe(case["depth"], min(case["matched"], student), student), file)
        file.flush()
        work = Workload(file.name, model, data, batch, layers=student, cached=cached, accelerator=accelerator)
    work.run(0, steps)
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    done = work.run(0, steps)
    if cuda:
        torch.cuda.synchronize()
    return {
        "ms": 1000 * (time.perf_counter() - began) / done,
        "peak_gib": (torch.cuda.max_memory_allocated() - held) / 2**30 if cuda else 0.0,
        "cache_seconds": work.cache_seconds if cached else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", default=",".join(GROWTH))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--results")
    args = parser.parse_args()
    accelerator = open_world()
    cuda = accelerator.device.type == "cuda"
    middle = MIDDLE if cuda else SMALL
    rows = []
    for axis in args.axes.split(","):
        for value in GROWTH[axis] if cuda else [middle[axis], 2 * middle[axis]]:
            case = middle | {axis: value}
            row: dict = {"axis": axis, "value": value}
            model = teacher(case["depth"], case["width"])
            for mode in ("live", "cached"):
                found = measure(model, case, mode == "cached", args.batch if cuda else 4, args.steps, accelerator)
                row |= {f"{mode}_{key}": number for key, number in found.items() if number is not None}
            rows.append(row)
            print(row, flush=True)
            if args.results:  # each time: what is stopped keeps what it has
                write(args.results, middle, args.batch, rows)
    keys = ["live_ms", "live_peak_gib", "cached_ms", "cached_peak_gib", "cached_cache_seconds"]
    print(
        markdown(
            ["what grows", "to", "live, ms", "GiB", "cached, ms", "GiB", "building the cache, s"],
            [[row["axis"], str(row["value"]), *(f"{row[key]:.2f}" for key in keys)] for row in rows],
        )
    )


def write(path: str, middle: dict[str, int], batch: int, rows: list[dict]) -> None:
    """The rows so far, and where they were measured."""
    machine = {k: v for k, v in environment().items() if k != "command"}
    result = {"environment": machine, "middle": middle, "batch": batch, "rows": rows}
    Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
