"""Tests never reach the network, and compute on one thread: fast for tiny models, and the same everywhere."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# A deadline measures the machine, not the code.
settings.register_profile("limbeck", deadline=None)
settings.load_profile("limbeck")


@pytest.fixture(scope="session", autouse=True)
def cache_of_packed_texts(tmp_path_factory):
    """Not the user's own."""
    os.environ["LIMBECK_CACHE"] = str(tmp_path_factory.mktemp("cache"))
