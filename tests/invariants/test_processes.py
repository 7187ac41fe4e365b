"""Two processes learn what one learns, within 1e-5 where dropout is off: with whole models (DDP) and with models that
are cut over them (FSDP2), a recipe of every kind and a task of every kind, short batches included."""

import json
import shutil
from functools import cache
from typing import NamedTuple

import pytest
import torch

import limbeck
from limbeck import LimbeckError, filters
from limbeck import recipe as book
from limbeck.data.kinds import KINDS
from tests import toy
from tests.invariants.test_split import assert_close, torchrun
from tests.recipes import test_every_kind as kinds

STEPS = 3  # the third batch is short
CHANGES = (f"stages.*.steps={STEPS}", "stages.*.lr=1e-3", "stages.*.batch=32")


class Case(NamedTuple):
    """A recipe, and the task and the family it is tried on."""

    recipe: str
    kind: str = "classification"
    family: str = "bert"
    pieces: bool = False  # whether one process has to take as many pieces as there are processes
    seed: int = 42


CASES = {
    "labels and predictions": Case("kd", "regression"),
    "pooled layers, aligners, draws": Case("rail-kd-l"),
    "attention of the last block alone": Case("minilm"),
    "a reused classifier": Case("ild-rtc", "multi-label"),
    # With 42 a gradient is 8e-9 at one step: what the order of additions changes there, Adam makes a step of.
    "inputs mixed among those of a process": Case("cr-ild", pieces=True, seed=7),
    "memory banks": Case("codir"),
    "flows solved on the whole batch": Case("bert-emd"),
    "blocks that take turns": Case("theseus", "tagging"),
    "a teacher that trains": Case("prokt"),
    "layers weighted by attention": Case("alp-kd"),
    "layers joined": Case("ckd-combine"),
    "heads on layers": Case("universal-kd"),
    "filters": Case("ted", "question-answering"),
    "states of tokens, the next word": Case("lwd", "causal-lm", "llama"),
    "states of tokens, hidden words": Case("distilbert", "masked-lm"),
    "an encoder and a decoder, filters": Case("ted", "seq2seq", "t5"),
}

# Every case in one start of the processes. `broken` stops after its second step, and `resumed` goes on from there.
SCRIPT = """
import json, sys
import limbeck
import torch
from limbeck import efficiency, filters
from limbeck.architectures import output_map
from limbeck.data.kinds import of
from limbeck.engine import loop
from limbeck.engine.world import PATIENCE
from torch.distributed.tensor import DTensor

out, cases, dropout = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
stop_after = None


class Watched(loop.Step):
    def __init__(self, distiller, *args, **options):
        super().__init__(distiller, *args, **options)
        self.calls = 0
        teachers = [distiller.teacher.model] if distiller.teacher else []
        for model in (distiller.student, *teachers) if sharding else ():
            # Read outside the model's forward, where a sharded module is in pieces.
            words = set(output_map(model).parameters()) if of(model).vocabulary else set()
            for name, weight in model.named_parameters():
                if weight not in words:
                    assert isinstance(weight, DTensor), name
                    assert weight.to_local().numel() <= (weight.numel() + 1) // 2 or weight.shape[0] % 2, name

    def __call__(self, *args):
        if self.calls == stop_after:
            raise KeyboardInterrupt
        super().__call__(*args)
        self.calls += 1


loop.Step = Watched
efficiency.latency = lambda models, batches: dict.fromkeys(models, 1.0)
filters.DROPOUT = 0.0


def distill(case, name, *, resume=False, teacher=None, **pace):
    pace = limbeck.Pace(log_every=1, shard=sharding, **pace)
    asked = case | {"teacher": teacher or case["teacher"]}
    limbeck.distill(out=f"{out}/{name}", quiet=True, resume=resume, pace=pace, **asked)


case = cases["pooled layers, aligners, draws"]
for sharding in (False, True):
    for name in cases:
        distill(cases[name], f"{'sharded' if sharding else 'copied'}/{name}")
    distill(case, f"{'sharded' if sharding else 'copied'}/pieces", micro_batch=6, recompute=True, cache="off")
distill(case, "uninterrupted", teacher=dropout)
stop_after = 2
for name, teacher in (("broken", case["teacher"]), ("resumed", dropout)):
    try:
        distill(case, name, teacher=teacher, save_every=0)
    except KeyboardInterrupt:
        pass
stop_after = None
distill(case, "resumed", resume=True, teacher=dropout)
world = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
assert world.options._timeout == PATIENCE  # the others wait while one scores at the end
"""


def files(kind):
    """70 rows to learn from, so that the third batch is short, and a few to score on."""
    case = kinds.CASES[kind]
    return {**toy.kinds_data(kind, case.row, 70, 8), "kind": kind, **dict(case.said)}


@cache
def asked(name):
    """What a case asks of `limbeck.distill`."""
    case = CASES[name]
    said = kinds.CASES[case.kind]
    teacher = toy.teacher(
        case.family, dropout=0.0, labels=said.labels, auto=KINDS[case.kind].auto, **dict(said.options)
    )
    how = {"recipe": case.recipe, "seed": case.seed, "set": CHANGES}
    return {**how, "teacher": teacher, "layers": 2, **files(case.kind)}


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The runs of two processes."""
    out = tmp_path_factory.mktemp("together")
    script = out / "script.py"
    script.write_text(SCRIPT, encoding="utf8")
    dropout = toy.teacher("bert", labels=kinds.CASES["classification"].labels)
    torchrun(script, out, json.dumps({name: asked(name) for name in CASES}), dropout, timeout=300)
    return out


@cache
def alone(name):
    """The same by one process."""
    out = toy.workplace() / f"alone-{name}"
    pace = limbeck.Pace(log_every=1, micro_batch=16 if CASES[name].pieces else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "DROPOUT", 0.0)
        limbeck.distill(out=out, quiet=True, pace=pace, **asked(name))
    return out


def assert_same(ours, theirs, recipe="rail-kd-l"):
    left, right = toy.metrics(ours), toy.metrics(theirs)
    assert len(toy.losses(ours)) == STEPS * len(book.resolve(recipe).stages)
    for one, other in zip(left, right, strict=True):
        assert one.pop("stage") == other.pop("stage")
        assert one.pop("eval", {}) == pytest.approx(other.pop("eval", {}), rel=1e-5)
        assert one == pytest.approx(other, abs=1e-5, rel=1e-5)
    assert_close(toy.weights(ours), toy.weights(theirs))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("door", ["copied", "sharded"])
def test_two_are_one(together, door, name):
    assert_same(together / door / name, alone(name), CASES[name].recipe)


def test_every_kind_is_here():
    assert {case.kind for case in CASES.values()} == set(kinds.CASES) - {"lambada"}  # its model is a causal one


POOLED = "pooled layers, aligners, draws"


@pytest.mark.slow
@pytest.mark.parametrize("door", ["copied", "sharded"])
def test_in_pieces_and_recomputed(together, door):
    assert_same(together / door / "pieces", alone(POOLED))


@pytest.mark.slow
def test_resumed_is_uninterrupted(together):
    ours, theirs = toy.weights(together / "resumed"), toy.weights(together / "uninterrupted")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert toy.losses(together / "resumed") == toy.losses(together / "uninterrupted")


@pytest.mark.slow
def test_a_sharded_run_is_finished_by_one_process(together, tmp_path):
    """A checkpoint knows nothing of processes."""
    shutil.copytree(together / "broken", tmp_path / "run")
    limbeck.distill(out=tmp_path / "run", quiet=True, resume=True, pace=limbeck.Pace(log_every=1), **asked(POOLED))
    assert_same(tmp_path / "run", alone(POOLED))


def test_one_process_cannot_share(tmp_path):
    with pytest.raises(LimbeckError, match=r"--shard.*there is one.*torchrun"):
        toy.distill("kd", tmp_path / "run", teacher=toy.teacher(), pace=limbeck.Pace(shard=True))
