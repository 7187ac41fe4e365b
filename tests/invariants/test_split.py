"""fp32, dropout off: a batch of 32 is 2 × 16 accumulated, within 1e-5, short batches included. test_processes.py has 2
processes × 16."""

import socket
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import limbeck
from tests import toy

# 64 fills its batches; 70 leaves a last batch of 6, of which a third micro-batch of 12 gets nothing but fill.
SIZES = (64, 70)
RECIPES = ("rail-kd-l", "ild-rtc")  # with aligners, without
# A rate at which five steps move every weight by far more than the tolerance.
ASKED = {"steps": 5, "set": ("stages.*.lr=1e-3", "stages.*.batch=32", "stages.*.keep=last")}


def teacher():
    return toy.teacher("bert", dropout=0.0)


def run(recipe, size, out, **pace):
    toy.distill(recipe, out, teacher=teacher(), pace=limbeck.Pace(log_every=1, **pace), **ASKED, **toy.data(size))
    return out


@cache
def whole(recipe, size):
    return run(recipe, size, toy.workplace() / f"whole-{recipe}-{size}")


def assert_same(run: Path, reference: Path):
    assert len(toy.losses(run)) == ASKED["steps"]
    for ours, theirs in zip(toy.losses(run), toy.losses(reference), strict=True):
        assert ours.pop("stage") == theirs.pop("stage")
        assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5)
    saved = [toy.weights(run), toy.weights(reference)]
    assert_close(*saved)
    beside = [path / "aligners.safetensors" for path in (run, reference)]
    assert beside[0].exists() == beside[1].exists()
    if beside[0].exists():
        assert_close(*map(load_file, beside))


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        # A softmax does not see a shift of all keys, or of all tokens where it says which one begins an answer: these
        # gradients are rounding alone, and Adam makes a step of it.
        if not name.endswith(("key.bias", "qa_outputs.bias")):
            torch.testing.assert_close(
                ours[name], theirs[name], atol=1e-5, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_reference_learns(recipe):
    """Otherwise equality would say nothing."""
    start, end = load_file(Path(teacher()) / "model.safetensors"), toy.weights(whole(recipe, 64))
    moved = [name for name in end if "LayerNorm" not in name and (end[name] - start[name]).abs().max() > 1e-3]
    assert len(moved) > 10


@pytest.mark.parametrize("micro", [16, 12, 1])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_accumulated(recipe, size, micro, tmp_path):
    assert_same(run(recipe, size, tmp_path / "run", micro_batch=micro), whole(recipe, size))


def launcher():
    """What starts two processes, as Python takes it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ("--master_addr", "127.0.0.1", "--master_port", str(port))
    return ("-m", "torch.distributed.run", "--nproc_per_node", "2", *where)


def torchrun(*arguments, **options):
    done = toy.command(*arguments, launcher=launcher(), **options)
    assert done.returncode == 0, done.stderr
    return done
