"""Whether a captured step is the same step: losses and parameters, captured against eager, on one GPU.

    python benchmarks/parity.py [--results FILE]

For each recipe: 200 steps in bf16 with dropout, and 50 in fp32 with dropout off and deterministic algorithms, where
parameters should be equal to the last bit.
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from workload import Workload, examples, lengths_of, teacher

from limbeck.report.tables import markdown
from limbeck.run import environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="kd,pkd,ild-rtc,lwd,rail-kd-l,rail-kd-c,simkd")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--lengths", default="40")
    parser.add_argument("--results")
    args = parser.parse_args()
    rows = []
    for recipe in args.recipes.split(","):
        for precision, steps, pieces in (("bf16", 200, 1), ("no", 50, 1), ("no", 50, 2)):
            rows.append(compare(recipe, precision, steps, pieces, args))
            print(rows[-1], flush=True)
    shown = ["recipe", "precision", "pieces", "steps", "largest loss gap", "largest parameter gap", "bit-equal"]
    keys = ["recipe", "precision", "pieces", "steps", "loss_gap", "parameter_gap", "equal"]
    cells = [[f"{row[k]:.2e}" if isinstance(row[k], float) else str(row[k]) for k in keys] for row in rows]
    print(markdown(shown, cells))
    if args.results:
        machine = {k: v for k, v in environment().items() if k != "command"}
        Path(args.results).write_text(json.dumps({"environment": machine, "rows": rows}, indent=1) + "\n")


def compare(recipe: str, precision: str, steps: int, pieces: int, args: argparse.Namespace) -> dict:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision=precision)
    exact = precision == "no"
    torch.use_deterministic_algorithms(exact, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = teacher(4, 256)
    if exact:
        model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.0
    data = examples(lengths_of(args.lengths, args.data, steps * 16))
    losses, weights, refused = [], [], None
    for eager in (True, False):
        work = Workload(
            recipe, model, data, 16, layers=2, eager=eager, accelerator=accelerator, pieces=pieces,
            set=("stages.*.lr=1e-4",),
        )  # fmt: skip
        seen = []
        for _ in range(steps // 10):
            work.run(epoch=0, most=10)
            seen.append(work.step.read()["loss"])
        torch.cuda.synchronize()
        losses.append(seen)
        weights.append([p.detach().clone() for p in work.distiller.parameters()])
        refused = list(work.step.captures.refused.values()) if work.step.captures else refused
    torch.use_deterministic_algorithms(False)
    gaps = [float((a - b).abs().max()) for a, b in zip(*weights)]
    return {
        "recipe": recipe, "precision": "bf16" if precision == "bf16" else "fp32", "pieces": pieces, "steps": steps,
        "loss_gap": max(abs(a - b) for a, b in zip(*losses)), "last_loss": losses[0][-1], "parameter_gap": max(gaps),
        "equal": all(torch.equal(a, b) for a, b in zip(*weights)), "refused": refused,
    }  # fmt: skip


if __name__ == "__main__":
    main()
