"""Compile every kernel for a GPU, where none is: Triton's compiler needs no more than the types of what it is given.

A process of its own, since Triton decides when it is imported whether kernels are interpreted. Each launch of two steps
of a tiny BERT is compiled in place of being run; what is computed in between is of no worth. Prints the kernels' names.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

from limbeck import kernels
from limbeck.distiller import Distiller
from limbeck.engine import step as steps
from limbeck.objectives import Labels, Match
from limbeck.recipe import Stage
from tests.engine.test_step import examples, run, world
from tests.tiny import tiny_model

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8",
    torch.bool: "i1",
}  # fmt: skip
done: set[str] = set()


def compiled(kernel: Any, *programs: int) -> Any:
    """In place of `kernels.grid`: what is given is compiled for, and nothing runs."""

    def launch(*given: Any, **named: Any) -> None:
        values = {**dict(zip(kernel.arg_names, given)), **{k: v for k, v in named.items() if k in kernel.arg_names}}
        fixed = {p.name for p in kernel.params if p.is_constexpr} | {k for k, v in values.items() if v is None}
        types = {name: "constexpr" if name in fixed else type_of(value) for name, value in values.items()}
        source = ASTSource(kernel, types, {name: values[name] for name in fixed})
        triton.compile(source, target=HOPPER, options={"num_warps": named.get("num_warps", 4)})
        done.add(f"{kernel.fn.__module__}.{kernel.fn.__name__}")

    return launch


def type_of(value: Any) -> str:
    """What Triton calls it."""
    return f"*{TYPES[value.dtype]}" if isinstance(value, torch.Tensor) else "i32"


def main() -> None:
    kernels.grid = compiled
    kernels.run_on = lambda device: True
    models = [tiny_model("bert", n, hidden_size=64, vocab_size=1500, seed=n) for n in (2, 4)]
    terms = {
        "labels": Labels(),
        "tokens": Match("hidden", map="uniform"),
        "means": Match("mean", map="random", align="both(width=64)", distance="unit_sq"),
        "directions": Match("cls", map="uniform", distance="unit_mse"),
    }
    module, make = Distiller(models[1], models[0], terms, steps=4).train(), steps.updating_at_once
    steps.updating_at_once = lambda *given: None  # an optimiser on a CPU has no state yet
    step = steps.Step(module, Stage("distil", {"labels": {}}, steps=4), world("bf16"), examples().on("cpu"))
    steps.prime(step.optimizer)
    step.one_pass = make(step.optimizer, step.half, step.direct)
    for pieces in (1, 2):
        run(step, module, 1, pieces)
    print(*sorted(done), sep="\n")


if __name__ == "__main__":
    main()
