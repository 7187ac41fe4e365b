"""What only a GPU can show; skipped elsewhere."""

import gc
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from limbeck.data import resident
from limbeck.data.kinds import KINDS
from limbeck.data.spec import DataSpec
from limbeck.distiller import Distiller
from limbeck.engine import products
from limbeck.engine.captures import Captures
from limbeck.engine.step import Step
from limbeck.objectives import Labels, Logits, Match
from limbeck.prepare import prepare
from limbeck.recipe import Stage
from limbeck.request import request
from limbeck.teachers import remembering
from tests import toy
from tests.engine.test_step import LR, examples
from tests.invariants.test_running_text import masked_teacher as masked
from tests.invariants.test_running_text import teacher as body
from tests.invariants.test_running_text import texts
from tests.recipes import test_every_kind as every_kind
from tests.recipes.test_every_recipe import RECIPES
from tests.tiny import every_family, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Memcpy DtoH")


class Waiting(Labels):
    """An objective that cannot be captured: it asks the device for a number."""

    def forward(self, student, teacher, batch):
        losses = super().forward(student, teacher, batch)
        return losses * (2.0 if losses.sum().item() < 0 else 1.0)


def accelerated():
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(mixed_precision="bf16")


def made(
    *,
    eager=False,
    cached=False,
    compiled=False,
    labels=Labels,
    family="bert",
    auto=AutoModelForSequenceClassification,
    attention=False,
    light=False,
    say=print,
):
    accelerator = accelerated()
    torch.manual_seed(3)
    terms = {
        "labels": labels(),
        "logits": Logits(),
        "layers": Match("hidden", map="uniform", align="linear(always=true)"),
        "drawn": Match("mean", map="random", align="both(width=8)", distance="unit_sq"),
    }
    if attention:
        terms["attention"] = Match("scores", map="last")
    student, teacher = tiny_model(family, 2, seed=1, auto=auto), tiny_model(family, 4, auto=auto)
    module = Distiller(teacher, student, terms, steps=10)
    if light:
        module.teacher.lighten(deepcopy(teacher).bfloat16())
    module.to("cuda").train()
    data = examples(64)
    if auto is AutoModelForCausalLM:  # what is right are the words themselves
        data = replace(data, labels=None)
    if cached:
        module.teacher = remembering(module.teacher, data, passes=9, choice="auto", device=accelerator.device, say=say)
    stage = Stage("distil", {"labels": {}}, steps=10, lr=LR)
    return module, Step(module, stage, accelerator, data.on("cuda"), eager=eager, compiled=compiled, say=say)


def run(module, step, count):
    with step.running():
        for at in range(count):
            module.at(at // 4, at)
            ids = np.random.default_rng(at).permutation(64)[:16]
            step([ids], 16 + 16 * (at % 2), 16, LR, seed=at)
    torch.cuda.synchronize()
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("how", [{}, {"cached": True}, {"eager": True}, {"eager": True, "cached": True}])
def test_twenty_steps_wait_for_nothing(how):
    module, step = made(**how)
    run(module, step, 6)  # every shape seen and captured
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        torch.cuda.synchronize()
        with record_function("twenty steps"), step.running():
            for at in range(20):
                module.at(at // 4, at)
                step([np.arange(16)], 16 + 16 * (at % 2), 16, LR, seed=at)
        torch.cuda.synchronize()
    events = list(profiler.events())
    within = next(e.time_range for e in events if e.name == "twenty steps" and e.cpu_time_total)
    waits = [e.name for e in events if e.name.startswith(WAITS) and within.start <= e.time_range.start < within.end]
    assert not waits
    assert any(e.name.startswith(("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernel")) for e in events)


@pytest.mark.parametrize("cached", [False, True])
def test_captured_is_eager(cached):
    eager = run(*made(eager=True, cached=cached), 20)
    module, step = made(cached=cached)
    captured = run(module, step, 20)
    assert step.half.draws.asked == 4  # both layers drop twice by masks of our own
    assert all(torch.equal(a, b) for a, b in zip(eager, captured))


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("cached", [False, True])
def test_what_makes_a_step_fast_changes_nothing(cached, pieces, monkeypatch):
    """Joined products, gradients beside, residual sums normed at once and an update in one pass, against torch's
    modules and torch's AdamW."""

    def losses():
        module, step = made(cached=cached, light=True)
        module.eval()  # no dropout
        found = []
        with step.running():
            for at in range(20):
                module.at(at // 4, at)
                ids = np.random.default_rng(at).permutation(64)[:16]
                step(np.split(ids, pieces), 16 + 16 * (at % 2), 16, LR, seed=at)
                found.append(step.read()["loss"])
        # A key's bias is the same to all a query sees: it has no gradient but rounding, which Adam makes steps of.
        moved = {n: p.detach().clone() for n, p in module.named_parameters() if not n.endswith("key.bias")}
        return step, torch.tensor(found), moved

    fast, ours, moved = losses()
    assert fast.one_pass
    assert any(len(leaf.names) == 3 for leaf in fast.half.leaves)
    assert fast.half.beside.apart.stream is not None
    assert sum(type(module).__name__ == "BertOutput" for module in fast.half.swapped.forwards) == 2
    assert cached or sum(type(module).__name__ == "BertOutput" for module in fast.above.forwards) == 4
    monkeypatch.setattr("limbeck.engine.step.updating_at_once", lambda *given: None)
    monkeypatch.setattr("limbeck.engine.step.frozen_forwards", lambda model: {})
    monkeypatch.setattr("limbeck.engine.residual.residuals", lambda model: {})
    monkeypatch.setattr("limbeck.engine.half.joints", lambda model: [])
    monkeypatch.setattr("limbeck.engine.half.trained_forwards", lambda *given: {})
    plain, theirs, as_well = losses()
    assert not plain.one_pass
    assert not {**plain.half.swapped.forwards, **plain.above.forwards}
    assert (ours - theirs).abs().max() <= 0.02 * theirs.abs().max()
    # Adam moves every weight by up to the learning rate, whichever way the rounding of a small gradient points.
    far = {name: float((moved[name] - as_well[name]).abs().mean()) for name in moved}
    assert not {name: mean for name, mean in far.items() if mean > LR}


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("family", every_family)
def test_every_family_is_captured(family, attention):
    """Also those that make their positions, masks and scores in a way of their own."""
    module, step = made(family=family, attention=attention)
    captured = run(module, step, 12)
    assert not step.captures.refused
    assert len(step.captures.graphs) == 2
    eager = run(*made(family=family, attention=attention, eager=True), 12)
    # DeBERTa gathers scores by position; the gradients of that are added up in any order.
    apart = 12 * LR if family == "deberta-v2" else 0
    assert all((a - b).abs().max() <= apart for a, b in zip(eager, captured))


def trained(ready, *, eager, say, length=64):
    """All stages, a few steps each: the steps, and what they made of the parameters."""
    accelerator, steps, ends = accelerated(), [], []
    for index in range(len(ready.stages)):
        ready.set_trained(index)
    for index, stage in enumerate(ready.stages):
        ready.set_trained(index)
        module = ready.distillers[index].to("cuda").train()
        step = Step(module, stage, accelerator, ready.train.on("cuda"), eager=eager, say=say)
        with step.running():
            for at in range(6):
                module.at(0, at)
                step([np.arange(8) + at], length, 8, LR, seed=at)
        torch.cuda.synchronize()
        steps.append(step)
        ends += [p.detach().clone() for p in module.parameters()]
    return steps, ends


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_captured(recipe):
    """To the last bit what it is eagerly, in all its stages; a recipe that is not captured says why."""
    teacher = toy.teacher("bert")
    who = {"student": teacher} if recipe == "finetune" else {"teacher": teacher}
    said: list[str] = []
    asked = request(recipe, DataSpec(**toy.data()), layers=2, **who)
    (steps, captured), (_, eager) = (trained(prepare(asked), eager=how, say=said.append) for how in (False, True))
    reasons = [[term.uncapturable for term in step.module.terms.values() if term.uncapturable] for step in steps]
    assert len(said) == sum(map(bool, reasons)), said
    for step, found in zip(steps, reasons):
        assert bool(step.captures) != bool(found)
        assert found or (len(step.captures.graphs) == 1 and not step.captures.refused)
    assert all(torch.equal(a, b) for a, b in zip(eager, captured))


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_language_models_are_captured(family, cached):
    options = {"family": family, "auto": AutoModelForCausalLM, "cached": cached}
    module, step = made(**options)
    captured = run(module, step, 12)
    assert not step.captures.refused
    eager = run(*made(**options, eager=True), 12)
    assert all(torch.equal(a, b) for a, b in zip(eager, captured))


@pytest.mark.parametrize("recipe", ["kd", "lwd", "ted"])
@pytest.mark.parametrize("family", ["t5", "bart", "marian"])
def test_encoder_decoders_are_captured(family, recipe):
    writer = toy.teacher(family, labels=2, auto=KINDS["seq2seq"].auto)
    asked = request(recipe, DataSpec(**every_kind.data("seq2seq")), teacher=writer, layers=2)
    made = (trained(prepare(asked), eager=how, say=print, length=(64, 32)) for how in (False, True))
    (steps, captured), (_, eager) = made
    assert all(len(step.captures.graphs) == 1 and not step.captures.refused for step in steps)
    assert all(torch.equal(a, b) for a, b in zip(eager, captured))


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize(
    ("recipe", "kind", "teacher"), [("att-mse:hid-seq", "text", body), ("distilbert", "masked-lm", masked)]
)
def test_running_text_is_captured(recipe, kind, teacher, fits, monkeypatch):
    """Whether its tokens lie on the device or are copied there batch by batch; hidden words change with every step."""
    monkeypatch.setattr(resident, "fits", lambda size, device: fits)
    asked = request(recipe, DataSpec(**{**texts(), "kind": kind}), teacher=teacher(), layers=2)
    (steps, captured), (_, eager) = (trained(prepare(asked), eager=how, say=print) for how in (False, True))
    assert all(len(step.captures.graphs) == 1 and not step.captures.refused for step in steps)
    assert all(torch.equal(a, b) for a, b in zip(eager, captured))


def test_no_garbage_is_collected_while_capturing():
    """Among it may be graphs of an earlier stage, and a capture does not survive the end of one."""
    captures, collects = Captures(), []
    buffer = torch.zeros(8, device="cuda")

    def work():
        collects.append(gc.isenabled())
        buffer.add_(1)

    with torch.cuda.stream(torch.cuda.Stream()):
        for seed in range(3):
            captures.run("key", work, seed)
    torch.cuda.synchronize()
    assert collects == [True, False]  # run, captured; then replayed
    assert gc.isenabled()
    assert buffer.tolist() == [3.0] * 8


@pytest.mark.parametrize("small", [products.SMALL, 4])
def test_a_step_that_cannot_be_captured_runs_eagerly(small, monkeypatch):
    """With dropout: a capture that failed must not leave the generator unusable. Nor what had begun beside it, such as
    a table's gradient if it is not small."""
    monkeypatch.setattr(products, "SMALL", small)
    said = []
    eager = run(*made(eager=True, labels=Waiting), 12)
    module, step = made(labels=Waiting, say=said.append)
    fallen = run(module, step, 12)
    assert len(step.captures.refused) == 2
    assert said
    assert all(line.startswith("a step is not captured and runs eagerly: ") for line in said)
    assert not any("mempool" in line for line in said)  # the second failed for a reason of its own
    assert all(torch.equal(a, b) for a, b in zip(eager, fallen))
