"""Every example exactly once an epoch, and draws that follow from seed, stage and epoch alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import limbeck
from limbeck.data.encoding import Encoded
from limbeck.engine import loop as loop_module
from limbeck.engine.checkpoints import State
from limbeck.engine.loop import Loop
from limbeck.objectives import Match
from limbeck.recipe import Stage
from tests import toy

EPOCHS = 3


class Recorder:
    """Stands where the optimiser's step does, and writes down the examples it is given."""

    def __init__(self, *_):
        self.batches: list[list[int]] = []
        self.optimizer = None

    def __call__(self, pieces, examples, lr):
        ids = [int(i) for piece in pieces for i in piece["id"][piece["weight"] > 0]]
        assert all((piece["id"] == -1).equal(piece["weight"] == 0) for piece in pieces)
        assert len({tuple(piece["input_ids"].shape) for piece in pieces}) == 1
        self.batches.append(ids)
        self.counts = [*getattr(self, "counts", []), examples]
        return {"loss": torch.tensor(0.0)}

    def mean_over_processes(self, parts):
        return {"loss": 0.0}


def seen(size, batch, world, micro, monkeypatch, tmp_path, seed=42):
    """What every rank's loop hands to its step, and how many examples it says the batch has."""
    monkeypatch.setattr(loop_module, "Step", Recorder)
    stage = Stage("only", {}, epochs=EPOCHS, batch=batch)
    lengths = np.random.default_rng(0).integers(3, 30, size)
    data = Encoded(
        {"input_ids": np.arange(lengths.sum(), dtype=np.int32)},
        np.concatenate([[0], np.cumsum(lengths)]),
        None,
        {"input_ids": 0},
    )
    ranks = []
    for rank in range(world):
        made = []
        monkeypatch.setattr(loop_module, "Step", lambda *_, made=made: made.append(Recorder()) or made[-1])
        accelerator = SimpleNamespace(
            num_processes=world, process_index=rank, device=torch.device("cpu"), is_main_process=True, trackers=[]
        )
        quiet = SimpleNamespace(start=lambda *_: None, step=lambda *_: None, stop=lambda: None, say=lambda *_: None)
        folder = SimpleNamespace(checkpoints=tmp_path, log=lambda *_: None, logged=lambda: 0, metrics="")
        distiller = SimpleNamespace(to=lambda device: None, objectives=None, at=lambda *_: None, student=None)
        pace = limbeck.Pace(micro_batch=micro)
        loop = Loop(accelerator, folder, quiet, data, 32, seed, pace, dict, {})
        monkeypatch.setattr(loop_module, "broadcast_object_list", lambda *_: None)
        loop.run(distiller, stage, State(), "last", None)
        ranks.append(made[0])
    return ranks


WORLDS = [(world, micro) for world in (1, 2, 3, 5) for micro in (None, 1, 4, 5, 16)]


@pytest.mark.parametrize("size", [64, 70, 5])
@pytest.mark.parametrize(("world", "micro"), WORLDS)
def test_every_example_once_an_epoch(size, world, micro, monkeypatch, tmp_path):
    ranks = seen(size, 16, world, micro, monkeypatch, tmp_path)
    steps = -(-size // 16)
    assert {len(rank.batches) for rank in ranks} == {EPOCHS * steps}
    for epoch in range(EPOCHS):
        part = slice(epoch * steps, (epoch + 1) * steps)
        ids = sorted(i for rank in ranks for batch in rank.batches[part] for i in batch)
        assert ids == list(range(size))


@pytest.mark.parametrize(("world", "micro"), WORLDS)
def test_the_batches_are_the_same_whoever_takes_them(world, micro, monkeypatch, tmp_path):
    alone = seen(70, 16, 1, None, monkeypatch, tmp_path)[0]
    ranks = seen(70, 16, world, micro, monkeypatch, tmp_path)
    together = [sorted(i for rank in ranks for i in rank.batches[step]) for step in range(len(alone.batches))]
    assert together == [sorted(batch) for batch in alone.batches]
    assert all(rank.counts == alone.counts == [len(batch) for batch in alone.batches] for rank in ranks)


def test_order_changes_with_epoch_and_seed(monkeypatch, tmp_path):
    first = seen(64, 16, 1, None, monkeypatch, tmp_path)[0].batches
    assert first == seen(64, 16, 1, None, monkeypatch, tmp_path)[0].batches
    assert first != seen(64, 16, 1, None, monkeypatch, tmp_path, seed=43)[0].batches
    assert first[:4] != first[4:8] != first[8:]


def test_a_micro_batch_is_no_larger_than_asked(monkeypatch, tmp_path):
    sizes = []
    real = Recorder.__call__
    monkeypatch.setattr(
        Recorder, "__call__", lambda self, pieces, *a: sizes.extend(len(p["id"]) for p in pieces) or real(self, pieces, *a)
    )
    for world, micro in WORLDS:
        sizes.clear()
        seen(70, 16, world, micro, monkeypatch, tmp_path)
        assert max(sizes) <= (micro or -(-16 // world))


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
