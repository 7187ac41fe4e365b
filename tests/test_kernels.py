"""Kernels of our own run where one of them was seen to, and nowhere else."""

import pytest
import torch

pytest.importorskip("triton")

from limbeck import kernels, squares

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
