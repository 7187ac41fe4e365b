"""Processes that do not see each other must not train apart."""

import sys

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import limbeck
from limbeck import LimbeckError, cli
from limbeck.engine import world


def test_a_process_that_sees_fewer_than_were_started_stops(monkeypatch):
    Accelerator(cpu=True)  # the world is settled: one process
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LimbeckError, match=r"2 processes were started but this one sees 1.*torchrun"):
        world.open_world()


def test_one_process_is_a_world(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert world.open_world().num_processes == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert world.open_world().num_processes == 1


@pytest.fixture
def nothing_opened(monkeypatch):
    monkeypatch.setattr(world, "_opened", set())
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("nothing_opened")
def test_an_accelerator_of_somebody_elses_keeps_its_precision():
    own = Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(LimbeckError, match=r'runs in "bf16".*precision='):
        world.open_world()
    assert own.mixed_precision == "bf16"
    assert world.open_world(precision="bf16").mixed_precision == "bf16"


@pytest.mark.usefixtures("nothing_opened")
def test_precision_is_that_of_the_run_whatever_an_earlier_one_had():
    found = [world.open_world(precision=asked).mixed_precision for asked in ("bf16", "auto", "bf16", "fp32")]
    assert found == ["bf16", "no", "bf16", "no"]


@pytest.mark.parametrize("asked", ["half", "bf61"])
def test_a_precision_there_is_none_of(asked):
    with pytest.raises(LimbeckError, match=r"--precision.*auto, fp32, bf16"):
        limbeck.Pace(precision=asked)


def test_a_seed_tells_its_parts_apart():
    parts = [
        (seed, stage, step, rank) for seed in range(4) for stage in range(3) for step in range(50) for rank in range(4)
    ]
    assert len({world.seed_for(*part) for part in parts}) == len(parts)
    assert world.seed_for(1, 2) != world.seed_for(2, 1)
    assert world.seed_for(1) != world.seed_for(1, 0)


@pytest.mark.parametrize(("name", "said"), [("MEGATRON_LM", "Megatron-LM"), ("FSDP", "FSDP")])
def test_what_accelerate_would_have_others_do_is_refused(name, said, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(LimbeckError, match=rf"{said}.*--shard"):
        world.open_world()


def test_a_command_takes_leave_of_the_other_processes(monkeypatch, tmp_path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    monkeypatch.setattr(sys, "argv", ["limbeck", "recipes"])
    with pytest.raises(SystemExit):
        cli.main()
    assert not dist.is_initialized()
