"""DeepSpeed's configurations, carried out without DeepSpeed."""

import json

import pytest

import limbeck
from limbeck import LimbeckError
from limbeck.engine.deepspeed import understood, wishes
from limbeck.recipe import resolve
from tests import toy
from tests.invariants.test_split import assert_same, teacher, torchrun

# What asks for what, of two processes: configuration, values of every stage, pace.
ASKED = {
    "nothing": ({}, {}, {}),
    "ddp": ({"zero_optimization": {"stage": 0}}, {}, {"shard": False}),
    "stage 1": ({"zero_optimization": {"stage": 1}}, {}, {"shard": True}),
    "stage 3": ({"zero_optimization": {"stage": 3, "overlap_comm": True}}, {}, {"shard": True}),
    "clip": ({"gradient_clipping": 0.5}, {"clip": 0.5}, {}),
    "no clip": ({"gradient_clipping": 0.0}, {"clip": 0.0}, {}),
    "batch": ({"train_batch_size": 32}, {"batch": 32}, {}),
    "micro": ({"train_micro_batch_size_per_gpu": 8}, {"batch": 16}, {"micro_batch": 8}),
    "micro and steps": (
        {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 3},
        {"batch": 48},
        {"micro_batch": 8},
    ),
    "batch and steps": (
        {"train_batch_size": 32, "gradient_accumulation_steps": 4},
        {"batch": 32},
        {"micro_batch": 4},
    ),
    "all three": (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2},
        {"batch": 32},
        {"micro_batch": 8},
    ),
    "one step": ({"gradient_accumulation_steps": 1, "train_batch_size": "auto"}, {}, {}),
    "optimiser": (
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1, "betas": [0.9, 0.999]}}},
        {"lr": 1e-4, "weight_decay": 0.1, "betas": [0.9, 0.999]},
        {},
    ),
    "eps": ({"optimizer": {"params": {"betas": [0.9, 0.98], "eps": 1e-6}}}, {"betas": [0.9, 0.98], "eps": 1e-6}, {}),
    "schedule": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 0}}},
        {"schedule": "constant", "lr": 1e-4, "warmup": 0},
        {},
    ),
    "recompute": ({"activation_checkpointing": {"partition_activations": True}}, {}, {"recompute": True}),
    "off": (
        {
            "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
            "zero_optimization": {"offload_param": {"device": "none", "pin_memory": True}, "cpu_offload": False},
            "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
            "compression_training": {},
        },
        {},
        {},
    ),
    "auto": (
        {
            "fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2},
            "bf16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
            "gradient_clipping": "auto",
            "train_micro_batch_size_per_gpu": "auto",
        },
        {"schedule": "linear"},
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_for(name):
    config, stage, pace = ASKED[name]
    found = understood(config, processes=2)
    assert (found.stage, found.pace) == (stage, pace)


REFUSED = {
    "fp16": {"enabled": True, "loss_scale": 0},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "OneBitAdam"},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 1000}},
    "gradient_clipping": "1.0",
    "train_batch_size": 0,
    "pipeline": {"stages": 2},
    "compression_training": {"weight_quantization": {}},
    "activation_checkpointing": {"cpu_checkpointing": True},
    "zero_optimisation": {"stage": 3},
    "dataloader_drop_last": True,
}


def test_every_key_that_cannot_be_honoured_is_named():
    with pytest.raises(LimbeckError) as caught:
        understood(REFUSED, processes=2)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == len(REFUSED)
    assert all(line.startswith(f"  {key}") for line, key in zip(lines, REFUSED, strict=True))


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"betas": 0.9}, r"optimizer.params.betas is 0.9, and has to be two numbers from 0 to below 1"),
        ({"betas": [0.9]}, r"betas is \[0.9\], and has to be two"),
        ({"betas": ["0.9", "0.98"]}, r"betas is .*'0.9'.*, and has to be two"),
        ({"betas": [0.9, "high"]}, r"betas is .*'high'.*, and has to be two"),
        ({"betas": [0.9, 1]}, r"betas is \[0.9, 1\], and has to be two"),
        ({"eps": "tiny"}, r"optimizer.params.eps is 'tiny', and has to be a number"),
    ],
)
def test_faulty_constants_of_adam(params, said):
    with pytest.raises(LimbeckError, match=said):
        understood({"optimizer": {"params": params}}, processes=1)


def test_constants_of_adam_reach_every_stage():
    found = understood({"optimizer": {"params": {"betas": [0.8, 0.95], "eps": 1e-7}}}, processes=1)
    recipe = resolve("ted", overrides=found.changes)
    assert [(stage.betas, stage.eps) for stage in recipe.stages] == [([0.8, 0.95], 1e-7)] * 2
    assert found.paced(limbeck.Pace(), recipe) == limbeck.Pace()
    with pytest.raises(LimbeckError, match=r"betas of stage filters is .*0.98.*says .*0.95"):
        found.paced(limbeck.Pace(), resolve("ted", overrides=[*found.changes, "stages.*.betas=[0.9, 0.98]"]))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 8}, r"train_batch_size 30.*8 × 1 × 2 = 16"),
        ({"train_batch_size": 31}, r"train_batch_size 31.*15 × 1 × 2 = 30"),
        ({"gradient_accumulation_steps": 4}, r"gradient_accumulation_steps 4.*train_batch_size"),
        (
            {"optimizer": {"params": {"lr": 1e-4}}, "scheduler": {"params": {"warmup_max_lr": 1e-3}}},
            r"optimizer.params.lr and scheduler.params.warmup_max_lr differ",
        ),
    ],
)
def test_what_contradicts_itself(config, said):
    with pytest.raises(LimbeckError, match=said):
        understood(config, processes=2)


def test_precision():
    for enabled, pace in ((False, {"precision": "fp32"}), (0, {"precision": "fp32"}), (True, {"precision": "bf16"})):
        assert understood({"bf16": {"enabled": enabled}}, processes=1).pace == pace
    assert understood({"bf16": {"enabled": "auto"}}, processes=1).pace == {}


def test_what_is_ignored_is_said_in_one_line():
    config = {"steps_per_print": 10, "wall_clock_breakdown": False, "zero_optimization": {"reduce_bucket_size": 5e8}}
    said = [note for note in understood(config, processes=1).notes if "ignored" in note]
    assert len(said) == 1
    assert said[0].endswith("ignored: steps_per_print, zero_optimization.reduce_bucket_size")


def test_what_the_command_line_says_too_must_agree():
    found = understood({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8}, processes=1)
    recipe = resolve("kd", overrides=[*found.changes, "stages.*.batch=32"])
    assert found.paced(limbeck.Pace(micro_batch=8), recipe).micro_batch == 8
    assert found.paced(limbeck.Pace(log_every=1), recipe) == limbeck.Pace(log_every=1, micro_batch=8)
    with pytest.raises(LimbeckError, match=r"--micro-batch is 4.*says 8"):
        found.paced(limbeck.Pace(micro_batch=4), recipe)
    with pytest.raises(LimbeckError, match=r"batch of stage distil is 16.*says 32"):
        found.paced(limbeck.Pace(), resolve("kd", overrides=[*found.changes, "stages.*.batch=16"]))
    with pytest.raises(LimbeckError, match=r"--shard is True.*says False"):
        understood({"zero_optimization": {"stage": 0}}, processes=2).paced(limbeck.Pace(shard=True), recipe)


def test_what_accelerate_hands_on(monkeypatch, tmp_path):
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert wishes(None).pace == {}
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert wishes(None).pace == {"shard": True}  # Accelerate's own choice is stage 2
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
    assert (wishes(None).pace, wishes(None).stage) == ({"shard": False}, {"clip": 0.5})
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu")
    with pytest.raises(LimbeckError, match=r"zero_optimization.offload_param"):
        wishes(None)
    file = written(tmp_path, {"zero_optimization": {"stage": 3}})
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    assert wishes(None).pace == wishes(file).pace == {"shard": True}
    (tmp_path / "other").mkdir()
    with pytest.raises(LimbeckError, match=r"different things"):
        wishes(written(tmp_path / "other", {"zero_optimization": {"stage": 2}}))


def written(folder, config):
    place = folder / "ds.json"
    place.write_text(json.dumps(config) if isinstance(config, dict) else config, "utf8")
    return place


@pytest.mark.parametrize(("text", "said"), [("{", "as JSON"), ("[1]", "holds no configuration")])
def test_a_file_that_is_none(text, said, tmp_path):
    with pytest.raises(LimbeckError, match=said):
        wishes(written(tmp_path, text))
    with pytest.raises(LimbeckError, match=r"missing.json.*as JSON"):
        wishes(tmp_path / "missing.json")


FILE = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 0.7,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": "auto"}},
    "zero_optimization": {"stage": 3},
}
CHANGES = ("stages.*.steps=5", "stages.*.keep=last")


@pytest.mark.slow
def test_two_processes_cut_by_a_file_are_one(tmp_path):
    file = written(tmp_path, FILE)
    asked = toy.options(teacher=teacher(), layers=2, out=tmp_path / "cut", log_every=1, deepspeed=file, set=CHANGES)
    torchrun("-m", "limbeck", "distill", "rail-kd-l", *asked, *toy.options(**toy.data(70)))
    assert "micro_batch 8, shard True" in (tmp_path / "cut" / "log.txt").read_text("utf8")
    changes = (*CHANGES, "stages.*.lr=1e-3", "stages.*.batch=32", "stages.*.clip=0.7")
    alone = toy.options(teacher=teacher(), layers=2, out=tmp_path / "whole", log_every=1, set=changes)
    assert toy.command("distill", "rail-kd-l", *alone, *toy.options(**toy.data(70))).returncode == 0
    assert_same(tmp_path / "cut", tmp_path / "whole")


def test_one_process_under_accelerates_configuration(tmp_path, monkeypatch):
    """Accelerate must not look for the package itself, and one process has nothing to cut."""
    file = written(tmp_path, {"zero_optimization": {"stage": 3}, "train_batch_size": 16})
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    toy.distill("kd", tmp_path / "run", teacher=teacher(), steps=1)
    request = json.loads((tmp_path / "run" / "request.json").read_text("utf8"))
    assert request["recipe"]["stages"][0]["batch"] == 16
