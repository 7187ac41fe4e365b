"""Models cut over two processes learn what whole ones learn in one, within 1e-5 where dropout is off."""

import shutil
from functools import cache

import pytest
import torch

import limbeck
from limbeck import LimbeckError
from tests import toy
from tests.invariants.test_split import assert_close, teacher, torchrun

# One of each kind: labels and logits; pooled layers with aligners; token states; attention alone, at the last block.
RECIPES = ("kd", "rail-kd-l", "hid-seq", "minilm")
STEPS = 5
CHANGES = (f"stages.*.steps={STEPS}", "stages.*.lr=1e-3", "stages.*.batch=32")

# Every case in one start of the processes. `broken` stops after its third step, and `resumed` goes on from there.
SCRIPT = """
import shutil, sys
import limbeck
from limbeck.engine import loop
from torch.distributed.tensor import DTensor

teacher, dropout, out, train, dev, recipes, *changes = sys.argv[1:]
stop_after = None


class Watched(loop.Step):
    def __init__(self, distiller, *args, **options):
        super().__init__(distiller, *args, **options)
        self.calls = 0
        teachers = [distiller.teacher.model] if distiller.teacher else []
        for model in (distiller.student, *teachers):
            for name, weight in model.named_parameters():
                assert isinstance(weight, DTensor), name
                assert weight.to_local().numel() <= (weight.numel() + 1) // 2 or weight.shape[0] % 2, name

    def __call__(self, *args):
        if self.calls == stop_after:
            raise KeyboardInterrupt
        super().__call__(*args)
        self.calls += 1


loop.Step = Watched


def distill(recipe, name, teacher=teacher, resume=False, **pace):
    limbeck.distill(
        recipe, teacher=teacher, layers=2, out=f"{out}/{name}", set=changes, train=train, eval=dev, quiet=True,
        resume=resume, pace=limbeck.Pace(log_every=1, shard=True, save_every=0, **pace),
    )


for recipe in recipes.split(","):
    distill(recipe, recipe)
distill("rail-kd-l", "pieces", micro_batch=6, recompute=True, cache="off")
distill("rail-kd-l", "uninterrupted", dropout)
stop_after = 3
for name, which in (("broken", teacher), ("resumed", dropout)):
    try:
        distill("rail-kd-l", name, which)
    except KeyboardInterrupt:
        pass
stop_after = None
distill("rail-kd-l", "resumed", dropout, resume=True)
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """The runs of two processes."""
    out = tmp_path_factory.mktemp("sharded")
    script = out / "script.py"
    script.write_text(SCRIPT, encoding="utf8")
    torchrun(script, teacher(), toy.teacher("bert"), out, *toy.data(70).values(), ",".join(RECIPES), *CHANGES)
    return out


@cache
def whole(recipe):
    """The same by one process."""
    out = toy.workplace() / f"unsharded-{recipe}"
    toy.distill(recipe, out, teacher=teacher(), steps=None, set=CHANGES, **toy.data(70))
    return out


def assert_same(ours, theirs):
    left, right = toy.metrics(ours), toy.metrics(theirs)
    assert len([line for line in left if "loss" in line]) >= STEPS
    for one, other in zip(left, right, strict=True):
        assert one.pop("stage") == other.pop("stage")
        assert one.pop("eval", {}) == pytest.approx(other.pop("eval", {}), rel=1e-5)
        assert one == pytest.approx(other, abs=1e-5, rel=1e-5)
    assert_close(toy.weights(ours), toy.weights(theirs))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_sharded_is_whole(sharded, recipe):
    assert_same(sharded / recipe, whole(recipe))


@pytest.mark.slow
def test_in_pieces_and_recomputed(sharded):
    assert_same(sharded / "pieces", whole("rail-kd-l"))


@pytest.mark.slow
def test_resumed_is_uninterrupted(sharded):
    ours, theirs = toy.weights(sharded / "resumed"), toy.weights(sharded / "uninterrupted")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert toy.losses(sharded / "resumed") == toy.losses(sharded / "uninterrupted")


@pytest.mark.slow
def test_a_sharded_run_is_finished_by_one_process(sharded, tmp_path):
    """A checkpoint knows nothing of processes."""
    shutil.copytree(sharded / "broken", tmp_path / "run")
    limbeck.distill(
        "rail-kd-l", teacher=teacher(), layers=2, out=tmp_path / "run", set=CHANGES, quiet=True, resume=True,
        pace=limbeck.Pace(log_every=1), **toy.data(70),
    )  # fmt: skip
    assert_same(tmp_path / "run", whole("rail-kd-l"))


LANGUAGE = """
import sys
import limbeck

teacher, out, train, dev, *changes = sys.argv[1:]
limbeck.distill(
    "kd", teacher=teacher, layers=2, out=out, set=changes, kind="causal-lm", max_length=24, train=train, eval=dev,
    quiet=True, pace=limbeck.Pace(log_every=1, shard=True),
)
"""


@pytest.mark.slow
def test_a_sharded_language_model_is_whole(tmp_path):
    """Its output embeddings are read outside its forward."""
    given = toy.teacher("llama", labels=2, auto="AutoModelForCausalLM", dropout=0.0, tie_word_embeddings=True)
    data = toy.kinds_data("sharded-text", lambda text: {"text": text})
    (tmp_path / "script.py").write_text(LANGUAGE, encoding="utf8")
    torchrun(tmp_path / "script.py", given, tmp_path / "sharded", *data.values(), *CHANGES)
    asked = {"teacher": given, "steps": None, "set": CHANGES, "kind": "causal-lm", "max_length": 24, **data}
    toy.distill("kd", tmp_path / "whole", **asked)
    assert_same(tmp_path / "sharded", tmp_path / "whole")


def test_one_process_cannot_share(tmp_path):
    with pytest.raises(LimbeckError, match=r"--shard.*there is one.*torchrun"):
        toy.distill("kd", tmp_path / "run", teacher=teacher(), pace=limbeck.Pace(shard=True))
