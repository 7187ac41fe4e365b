"""Every example exactly once an epoch, and draws that follow from seed, stage and epoch alone."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

import limbeck
from limbeck.data import plan
from limbeck.data.encoding import Encoded
from limbeck.engine import loop as loop_module
from limbeck.engine.checkpoints import State
from limbeck.engine.loop import Loop
from limbeck.objectives import Match
from limbeck.recipe import Stage
from tests import toy

EPOCHS = 3


class NoStep:
    """Stands where the optimiser's step does, and moves nothing."""

    captures = optimizer = None
    running = nullcontext

    def __init__(self, *_, **__):
        pass

    def __call__(self, *_, **__):
        pass

    def read(self):
        return {"loss": 0.0}


def seen(size, batch, world, micro, monkeypatch, tmp_path, seed=42):
    """For every rank and step, the micro-batches of example ids the loop hands out; -1 fills."""
    lengths = np.random.default_rng(0).integers(3, 30, size)
    data = Encoded(
        {"input_ids": np.arange(lengths.sum(), dtype=np.int32)},
        np.concatenate([[0], np.cumsum(lengths)]),
        None,
        {"input_ids": 0},
    )
    ranks = []
    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "Step", NoStep)
        patch.setattr(loop_module, "broadcast_object_list", lambda *_: None)
        for rank in range(world):
            handed = []

            def share(*asked, handed=handed):
                handed.append(plan.share(*asked))
                return handed[-1]

            patch.setattr(loop_module, "share", share)
            accelerator = SimpleNamespace(
                num_processes=world, process_index=rank, device=torch.device("cpu"), is_main_process=True, trackers=[]
            )
            folder = MagicMock(checkpoints=tmp_path)
            loop = Loop(
                accelerator, folder, MagicMock(), data, 32, seed, limbeck.Pace(micro_batch=micro), dict, modules={}
            )
            loop.run(MagicMock(), Stage("only", {}, epochs=EPOCHS, batch=batch), State(), "last", None)
            ranks.append(handed)
    return ranks


def real(pieces):
    return [int(i) for piece in pieces for i in piece if i != plan.FILL]


WORLDS = [(world, micro) for world in (1, 2, 3, 5) for micro in (None, 1, 4, 5, 16)]


@pytest.mark.parametrize("size", [64, 70, 5])
@pytest.mark.parametrize(("world", "micro"), WORLDS)
def test_every_example_once_an_epoch(size, world, micro, monkeypatch, tmp_path):
    ranks = seen(size, 16, world, micro, monkeypatch, tmp_path)
    steps = -(-size // 16)
    assert {len(rank) for rank in ranks} == {EPOCHS * steps}
    for epoch in range(EPOCHS):
        part = slice(epoch * steps, (epoch + 1) * steps)
        ids = sorted(i for rank in ranks for pieces in rank[part] for i in real(pieces))
        assert ids == list(range(size))


@pytest.mark.parametrize(("world", "micro"), WORLDS)
def test_the_batches_are_the_same_whoever_takes_them(world, micro, monkeypatch, tmp_path):
    alone = [sorted(real(pieces)) for pieces in seen(70, 16, 1, None, monkeypatch, tmp_path)[0]]
    ranks = seen(70, 16, world, micro, monkeypatch, tmp_path)
    assert [sorted(i for rank in ranks for i in real(rank[step])) for step in range(len(alone))] == alone


@pytest.mark.parametrize(("world", "micro"), WORLDS)
def test_micro_batches_are_of_one_size_and_no_larger_than_asked(world, micro, monkeypatch, tmp_path):
    ranks = seen(70, 16, world, micro, monkeypatch, tmp_path)
    sizes = {len(piece) for rank in ranks for pieces in rank for piece in pieces}
    assert len(sizes) == 1
    assert sizes.pop() <= (micro or -(-16 // world))


def test_order_changes_with_epoch_and_seed(monkeypatch, tmp_path):
    first = [real(pieces) for pieces in seen(64, 16, 1, None, monkeypatch, tmp_path)[0]]
    assert first == [real(pieces) for pieces in seen(64, 16, 1, None, monkeypatch, tmp_path)[0]]
    assert first != [real(pieces) for pieces in seen(64, 16, 1, None, monkeypatch, tmp_path, seed=43)[0]]
    assert first[:4] != first[4:8] != first[8:]


def draws(out, monkeypatch, **asked):
    """The teacher layers RAIL drew, by epoch."""
    found: dict[int, set[tuple]] = {}
    real = Match.at

    def at(self, moment):
        real(self, moment)
        found.setdefault(moment.epoch, set()).add(tuple(self.draw.tolist()))

    with monkeypatch.context() as patch:
        patch.setattr(Match, "at", at)
        toy.distill("rail-kd-l", out, steps=None, teacher=toy.teacher("bert", layers=12), layers=4, **asked)
    assert all(len(drawn) == 1 for drawn in found.values())
    return {epoch: next(iter(drawn)) for epoch, drawn in found.items()}


def test_a_draw_follows_from_seed_and_epoch(tmp_path, monkeypatch):
    epochs = "stages.*.epochs=6"
    one = draws(tmp_path / "one", monkeypatch, set=(epochs, "stages.*.batch=32"))
    other = draws(
        tmp_path / "other", monkeypatch, set=(epochs, "stages.*.batch=13"), pace=limbeck.Pace(micro_batch=5),
        **toy.data(40),
    )  # fmt: skip
    assert one == other
    assert len(set(one.values())) > 1
    assert all(list(drawn) == sorted(set(drawn)) for drawn in one.values())
    assert draws(tmp_path / "seed", monkeypatch, set=(epochs, "stages.*.batch=32"), seed=1) != one
