"""Kernels of our own run where one of them was seen to, and nowhere else."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from limbeck import kernels, squares
from tests import toy

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def untried():
    kernels._one_runs.cache_clear()
    yield
    kernels._one_runs.cache_clear()


@pytest.fixture
def interpreted(monkeypatch):
    """Where there is no GPU, what is asked of one runs in Triton's interpreter."""
    if not torch.cuda.is_available():
        ones = torch.ones
        monkeypatch.setattr(torch, "ones", lambda *sizes, device, **options: ones(*sizes, **options))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


@pytest.mark.usefixtures("interpreted")
def test_what_cannot_run_is_left_to_torch(monkeypatch):
    def fail(*given):
        raise RuntimeError("Failed to find C compiler.\nSet CC.")

    monkeypatch.setattr(squares, "mean_squares", fail)
    with pytest.warns(UserWarning, match=r"RuntimeError: Failed to find C compiler\.$"):
        assert not kernels.run_on(DEVICE)
    assert not kernels.run_on(DEVICE)  # said once


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_one_that_runs_is_enough(context):
    with context():
        assert kernels.run_on(DEVICE)
    assert kernels._one_runs.cache_info().misses == 1


def test_without_a_gpu_none_runs():
    assert not kernels.run_on(torch.device("cpu"))
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="torch's do instead"):
            assert not kernels.run_on(DEVICE)


def test_without_triton_none_runs(monkeypatch):
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert not kernels.run_on(DEVICE)


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu():
    """Which the interpreter does not show."""
    source = toy.ROOT / "src" / "limbeck"
    wanted = {
        f"limbeck.{'.'.join(path.relative_to(source).with_suffix('').parts)}.{name}"
        for path in source.rglob("*.py")
        for name in re.findall(r"kernels\.grid\((\w+)", path.read_text("utf8"))
    }
    environment = {k: v for k, v in toy.environment().items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{toy.ROOT}:{environment['PYTHONPATH']}:{Path(find_spec('triton').origin).parents[1]}"
    command = [sys.executable, "-m", "tests.compile_kernels"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert set(found.stdout.split()) == wanted, found.stderr
