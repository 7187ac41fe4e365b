"""Tests never reach the network, and compute on one thread: fast for tiny models, and the same everywhere."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run all the same; read when triton is imported

from limbeck import efficiency

torch.set_num_threads(1)

# A deadline measures the machine, not the code.
settings.register_profile("limbeck", deadline=None)
settings.load_profile("limbeck")


@pytest.fixture(scope="session", autouse=True)
def cache_of_packed_texts(tmp_path_factory):
    """Not the user's own."""
    os.environ["LIMBECK_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def nothing_to_wait_for():
    """No model is timed, a fifth of a second a run: test_efficiency.py does it, and whatever has a process of its own.
    No disk is waited for: no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(efficiency, "latency", lambda models, batches: dict.fromkeys(models, 1.0))
        patch.setattr(os, "fsync", lambda file: None)
        yield
