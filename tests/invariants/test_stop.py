"""Ctrl-C and SIGTERM stop a run between two steps, and nothing is lost."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests import toy
from tests.invariants.test_split import launcher


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_goes_on_where_it_stopped(number, tmp_path):
    out = tmp_path / "run"
    asked = toy.options(teacher=toy.teacher("bert"), layers=2, out=out, log_every=1, **toy.data(64))
    command = [sys.executable, "-m", "limbeck", "distill", "rail-kd-l", *asked, "--set", "stages.*.steps=4000"]
    process = subprocess.Popen(command, env=toy.environment(), stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not ((out / "metrics.jsonl").exists() and len(toy.losses(out)) > 5):
        time.sleep(0.05)
    os.kill(process.pid, number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert "--resume" in said
    (state,) = (out / "checkpoints").glob("*/state.json")
    step = json.loads(state.read_text())["step"]
    assert f"stops after step {step}, which is saved" in said
    assert toy.losses(out)[-1]["step"] == step


def test_resuming_without_a_checkpoint_says_so(tmp_path, capsys, monkeypatch):
    from limbeck.engine.loop import Loop

    def fail(*_):
        raise RuntimeError("no power")

    monkeypatch.setattr(Loop, "run", fail)
    with pytest.raises(RuntimeError, match="no power"):
        toy.distill("kd", tmp_path / "run", teacher=toy.teacher("bert"))
    monkeypatch.undo()
    import limbeck

    limbeck.distill(
        "kd", teacher=toy.teacher("bert"), out=tmp_path / "run", layers=2, set=["stages.*.steps=3"], resume=True,
        **toy.data(),
    )  # fmt: skip
    assert "there is no checkpoint yet" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_stop_at_the_same_step(tmp_path):
    """A signal that only one of them hears stops both, after the same step."""
    out = tmp_path / "run"
    asked = toy.options(teacher=toy.teacher("bert"), layers=2, out=out, log_every=1, shard=True, **toy.data(64))
    command = [
        sys.executable,
        *launcher(),
        "-m",
        "limbeck",
        "distill",
        "rail-kd-l",
        *asked,
        "--set",
        "stages.*.steps=4000",
    ]
    process = subprocess.Popen(command, env=toy.environment(), stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not ((out / "metrics.jsonl").exists() and len(toy.losses(out)) > 5):
        time.sleep(0.05)
    workers = sorted(psutil.Process(process.pid).children(), key=lambda worker: worker.environ()["RANK"])
    workers[1].send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    (state,) = (out / "checkpoints").glob("*/state.json")
    step = json.loads(state.read_text())["step"]
    assert f"stops after step {step}, which is saved" in said
    assert said.count("interrupted") == 2  # each in its own time, none killed by the launcher
    assert toy.losses(out)[-1]["step"] == step
