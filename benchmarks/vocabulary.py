"""What KL over a large vocabulary costs: all logits at once, as usual, against some rows at a time.

    python benchmarks/vocabulary.py                     # on CPU: small shapes, seconds
    python benchmarks/vocabulary.py --results FILE      # on CUDA: 16 texts of 1024 tokens over 32000 words

Times are forward and backward, the best of several; memory is the peak above what the inputs take (on CUDA only). Both
start from last hidden states and output embeddings in bf16 (fp32 on CPU), the teacher's wider than the student's.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from limbeck.distances import logits_kl
from limbeck.report.tables import markdown
from limbeck.run import environment
from limbeck.vocabulary import Predictor, kl

TEMPERATURE = 2.0


@dataclass
class Size:
    """How much there is to predict, and from how wide a state."""

    batch: int
    length: int
    words: int
    student: int
    teacher: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--results")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    size = Size(16, 1024, 32000, 768, 1024) if cuda else Size(2, 128, 4000, 64, 96)
    student, teacher = predictors(size, torch.device("cuda" if cuda else "cpu"))
    found = [{"rows": "all", **measured(lambda: naive(student, teacher), student, args.times)}]
    for rows in args.rows:
        work = lambda rows=rows: kl(student, teacher, temperature=TEMPERATURE, rows=rows)  # noqa: E731
        found.append({"rows": str(rows), **measured(work, student, args.times)})
    whole = found[0]
    print(
        markdown(
            ["rows at a time", "ms", "× time", "peak GiB", "× memory", "loss"],
            [
                [
                    row["rows"],
                    f"{row['ms']:.2f}",
                    f"{row['ms'] / whole['ms']:.2f}",
                    f"{row['gib']:.3f}",
                    f"{row['gib'] / whole['gib']:.3f}" if whole["gib"] else "",
                    f"{row['loss']:.6f}",
                ]
                for row in found
            ],
        )
    )
    if args.results:
        machine = {k: v for k, v in environment().items() if k != "command"}
        result = {"environment": machine, "size": asdict(size), "rows": found}
        Path(args.results).write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")


def predictors(size: Size, device: torch.device) -> tuple[Predictor, Predictor]:
    """A student's and a teacher's states and output embeddings, at random; their logits have a deviation of 4."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    made = []
    for width in (size.student, size.teacher):
        states = torch.randn(size.batch, size.length, width, device=device).to(dtype)
        weight = (4 * torch.randn(size.words, width, device=device) / width**0.5).to(dtype)
        made.append(Predictor(states, weight))
    return Predictor(*(t.requires_grad_() for t in made[0][:2])), made[1]


def naive(student: Predictor, teacher: Predictor) -> Tensor:
    """All logits of both models, as a loop without this would have them."""
    with torch.no_grad():
        above = (teacher.states @ teacher.weight.T).float()
    return logits_kl((student.states @ student.weight.T).float(), above, temperature=TEMPERATURE)


def measured(loss: Callable[[], Tensor], student: Predictor, times: int) -> dict[str, float]:
    """Milliseconds and GiB of a forward and a backward."""
    cuda = student.states.is_cuda
    held = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    took, value = [], 0.0
    for _ in range(times + 2):
        student.states.grad = student.weight.grad = None
        wait(cuda)
        began = time.perf_counter()
        mean = loss().mean()
        mean.backward()
        wait(cuda)
        took.append(time.perf_counter() - began)
        value = mean.item()
        del mean
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30 if cuda else 0.0
    student.states.grad = student.weight.grad = None
    return {"ms": 1000 * min(took[2:]), "gib": peak, "loss": value}


def wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
