"""Models with an encoder and a decoder, recomputed and cut over processes, learn what they learn otherwise."""

import pytest
import torch

import limbeck
from limbeck import Distiller
from limbeck.objectives import Labels, Logits, Match
from tests import toy
from tests.engine.test_blocks import assert_recomputed_is_plain
from tests.invariants.test_split import torchrun
from tests.tiny import tiny_pair, tiny_texts

families = pytest.mark.parametrize("family", ["t5", "bart"])


@families
def test_recomputed_blocks_give_the_same(family):
    """Losses bit for bit, dropout and the attention between the two included; gradients but for the order of sums."""
    objectives = {
        "labels": Labels("cross_entropy"),
        "logits": Logits("kl(temperature=2)"),
        "hidden": Match("hidden(side=encoder)", map="uniform", distance="mse"),
        "attention": Match("attention", map="last", distance="kl"),
        "cross": Match("attention(side=cross)", map="last", distance="kl"),
    }
    module = Distiller(tiny_pair(family), tiny_pair(family, 2, 2, seed=1), objectives).train()
    batch = tiny_texts(sizes=(9, 5, 7, 9), targets=(3, 6, 4, 6))
    assert_recomputed_is_plain(module, batch)


def data():
    return toy.kinds_data("scaled", lambda text: {"source": text, "target": " ".join(reversed(text.split()[:4]))})


# The first stage compares layers alone, so nothing around the blocks is held whole when what is written is scored.
CHANGES = ("stages.*.steps=3", "stages.*.lr=1e-3", "stages.*.batch=16")
SCRIPT = """
import sys
import limbeck

out, train, dev, t5, bart, *changes = sys.argv[1:]
for family, teacher in {"t5": t5, "bart": bart}.items():
    limbeck.distill(
        "l-ild", teacher=teacher, layers=2, side="both", out=f"{out}/{family}", set=changes, train=train, eval=dev,
        quiet=True, pace=limbeck.Pace(log_every=1, shard=True, recompute=True),
    )
"""


def teacher(family):
    return toy.teacher(family, labels=2, auto="AutoModelForSeq2SeqLM", dropout=0.0)


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """The runs of two processes."""
    out = tmp_path_factory.mktemp("cut")
    (out / "script.py").write_text(SCRIPT, encoding="utf8")
    torchrun(out / "script.py", out, *data().values(), teacher("t5"), teacher("bart"), *CHANGES)
    return out


@pytest.mark.slow
@families
def test_sharded_and_recomputed_is_whole(cut, family, tmp_path):
    toy.distill("l-ild", tmp_path / "run", teacher=teacher(family), side="both", steps=None, set=CHANGES, **data())
    for one, other in zip(toy.metrics(cut / family), toy.metrics(tmp_path / "run"), strict=True):
        assert one.pop("stage") == other.pop("stage")
        assert one.pop("eval", {}) == pytest.approx(other.pop("eval", {}), rel=1e-5)
        assert one == pytest.approx(other, abs=1e-5, rel=1e-5)
    ours, theirs = toy.weights(cut / family), toy.weights(tmp_path / "run")
    assert ours.keys() == theirs.keys()
    for name in ours:
        if not name.endswith("k_proj.bias"):  # a softmax does not see a shift of all keys
            torch.testing.assert_close(ours[name], theirs[name], atol=1e-5, rtol=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_compiled_and_the_run_says_so(tmp_path):
    pace = limbeck.Pace(compile="on")
    toy.distill("kd", tmp_path / "run", teacher=toy.teacher("bert"), steps=1, pace=pace)
    assert "compiled on a GPU, and there is none" in (tmp_path / "run" / "log.txt").read_text("utf8")
