"""The loss on text held out is known to every process, and needs all of them."""

import json

import pytest

from tests.invariants.test_running_text import teacher, texts
from tests.invariants.test_split import torchrun

# Flows are solved on the batches of all processes; models cut over processes run on all of them.
SCRIPT = """
import sys
import limbeck

teacher, train, dev, out = sys.argv[1:]
for name, shard in (("whole", False), ("cut", True)):
    limbeck.distill(
        "bert-emd", teacher=teacher, layers=2, out=f"{out}/{name}", set=["stages.*.steps=2", "stages.*.batch=8"],
        train=train, eval=dev, kind="text", max_length=32, quiet=True, pace=limbeck.Pace(log_every=1, shard=shard),
    )
"""


@pytest.mark.slow
def test_by_all_processes(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf8")
    torchrun(tmp_path / "script.py", teacher(), texts()["train"], texts()["eval"], tmp_path)
    scores = [json.loads((tmp_path / name / "scores.json").read_text("utf8")) for name in ("whole", "cut")]
    assert scores[0]["student"] == pytest.approx(scores[1]["student"], rel=1e-4)
