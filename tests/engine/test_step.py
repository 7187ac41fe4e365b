"""One step: its buffers stay where they are, half precision is exact where it should be, and it falls back aloud."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from limbeck.data.encoding import Encoded
from limbeck.distiller import Distiller
from limbeck.engine import captures, half
from limbeck.engine.captures import Captures
from limbeck.engine.compiled import Compiled
from limbeck.engine.step import Step, groups
from limbeck.engine.step import captures as captures_of
from limbeck.objectives import Labels, Logits, Match
from limbeck.recipe import Stage
from limbeck.taps import Tap
from tests.tiny import VOCABULARY, tiny_batch, tiny_model

LR = 1e-3


def world(precision="no"):
    """As much of an Accelerator as a step on one CPU asks for."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        mixed_precision=precision,
        autocast=nullcontext,
        no_sync=lambda module: nullcontext(),
        reduce=lambda value, reduction: value,
    )


def examples(count=12):
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(3, 16, count))])
    columns = {name: rng.integers(5, VOCABULARY, offsets[-1]).astype(np.int32) for name in ("input_ids",)}
    columns["token_type_ids"] = np.zeros(offsets[-1], np.int32)
    return Encoded(columns, offsets, rng.integers(0, 3, count), {"input_ids": 0, "token_type_ids": 0})


def distiller(**maps):
    student, teacher = tiny_model("bert", 2, seed=1), tiny_model("bert", 4)
    torch.manual_seed(3)
    match = Match("mean", **{"map": "random", "align": "both(width=8)", "distance": "unit_sq"} | maps)
    return Distiller(teacher, student, {"labels": Labels(), "logits": Logits(), "layers": match}, steps=10).train()


def made(precision="no", **options):
    asked = {name: options.pop(name) for name in ("clip", "betas", "eps") if name in options}
    stage = Stage("distil", {"labels": {}}, steps=10, lr=LR, **asked)
    module = distiller()
    return module, Step(module, stage, world(precision), examples().on("cpu"), **options)


def run(step, module, count=3, pieces=1):
    for at in range(count):
        module.at(at, at)  # an epoch a step: the draw moves
        ids = np.arange(4 * at, 4 * at + 4) % 12
        step(np.split(ids, pieces), 16, 4, LR / (at + 1), seed=at)
    return step.read()


def places(step, module):
    tensors = [*step.rates, step.count, step.parts, *step.ids.values(), *step.parameters, *module.buffers()]
    tensors += [value for state in step.optimizer.state.values() for value in state.values()]
    tensors += [*step.half.gradients.values(), *(leaf.tensor for leaf in step.half.leaves)] if step.half else []
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_buffers_stay_where_they_are(precision, pieces):
    """What a captured step would read and write is the same memory at every step, though lr, ids and draw change."""
    module, step = made(precision)
    run(step, module, 1, pieces)
    draws = {tuple(module.terms["layers"].pairs())}
    before = places(step, module)
    for at in range(1, 6):
        module.at(at, at)
        draws.add(tuple(module.terms["layers"].pairs()))
        step(np.split(np.arange(4), pieces), 16, 4, LR * at, seed=at)
        assert [float(rate) for rate in step.rates] == pytest.approx([LR * at] * len(step.rates))
    assert places(step, module) == before
    assert len(draws) > 1


ADAM = {"betas": [0.5, 0.7], "eps": 1e-3}


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_stage_has_its_own_constants_of_adamw(precision):
    (ours, step), (theirs, other) = made(precision, **ADAM), made(precision)
    for group in other.optimizer.param_groups:
        group.update(betas=(0.5, 0.7), eps=1e-3)
    run(step, ours.eval())
    run(other, theirs.eval())
    plain, third = made(precision)
    run(third, plain.eval())
    for a, b, c in zip(ours.parameters(), theirs.parameters(), plain.parameters()):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def reference(module, steps=3):
    """The same training, by hand: a bf16 copy of the student a step, gradients brought to the fp32 weights."""
    stage = Stage("distil", {"labels": {}}, steps=10, lr=LR)
    optimizer = torch.optim.AdamW(groups(module, stage), fused=True)
    tokens = examples().on("cpu")
    student = module.student
    for at in range(steps):
        module.at(at, at)
        torch.manual_seed(at)
        exact = {name: p.detach().clone() for name, p in student.named_parameters()}
        optimizer.zero_grad()
        student.bfloat16()
        batch = tokens.batch(torch.arange(4 * at, 4 * at + 4) % 12, 16)
        module(**batch, count=torch.tensor(4.0)).loss.backward()
        found = {name: p.grad.float() for name, p in student.named_parameters()}
        for name, p in student.named_parameters():
            p.grad = None
            p.data = exact[name]
            p.grad = found[name]
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        for group in optimizer.param_groups:
            group["lr"].fill_(LR / (at + 1))
        optimizer.step()
    return student


def test_half_precision_is_a_bf16_student_with_fp32_weights(monkeypatch):
    # Queries, keys and values as one product round once where three round three times.
    monkeypatch.setattr(half, "joints", lambda model: [])
    module, step = made("bf16")
    run(step, module)
    by_hand = reference(distiller())
    start = dict(distiller().student.named_parameters())
    for name, weight in module.student.named_parameters():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, by_hand.get_parameter(name), atol=1e-7, rtol=1e-6)
    assert sum((w - start[n]).abs().max() > LR / 2 for n, w in module.student.named_parameters()) > 10


def test_half_precision_leaves_aligners_in_full():
    module, step = made("bf16")
    run(step, module)
    assert {p.dtype for p in module.objectives.parameters()} == {torch.float32}
    assert {id(p) for p in step.direct} == {id(p) for p in module.objectives.parameters()}


def test_half_precision_in_pieces_adds_up_in_fp32():
    """bf16 pieces differ from a bf16 whole by rounding; their sum must not lose more."""
    whole, pieces = (made("bf16") for _ in range(2))
    for (module, step), count in ((whole, 1), (pieces, 2)):
        run(step, module.eval(), 1, count)  # without dropout, which pieces draw for themselves
    for a, b in zip(whole[1].half.gradients.values(), pieces[1].half.gradients.values()):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 0.05 * a.norm() + 1e-3


def test_half_precision_trains_what_trains():
    module = distiller()
    for name, parameter in module.student.named_parameters():
        parameter.requires_grad_("classifier" not in name)
    before = module.student.classifier.weight.clone()
    step = Step(module, Stage("distil", {"labels": {}}, steps=10, lr=LR), world("bf16"), examples().on("cpu"))
    run(step, module)
    assert torch.equal(before, module.student.classifier.weight)


def test_half_precision_where_nothing_of_the_student_trains():
    module = distiller()
    module.student.requires_grad_(False)
    step = Step(module, Stage("distil", {"labels": {}}, steps=10, lr=LR), world("bf16"), examples().on("cpu"))
    before = [p.clone() for p in step.parameters]
    run(step, module)
    assert not any(torch.equal(a, b) for a, b in zip(before, step.parameters))


def test_a_term_may_have_a_pace_of_its_own():
    module = distiller()
    module.terms["layers"].pace = 0.25
    step = Step(module, Stage("distil", {"labels": {}}, steps=10, lr=LR), world(), examples().on("cpu"))
    own = {id(p) for p in module.objectives.parameters()}
    before = {id(p): p.detach().clone() for p in step.parameters}
    run(step, module, 1)
    moved = {id(p): float((p.detach() - before[id(p)]).abs().max()) for p in step.parameters}
    for theirs, rate in (
        (True, 0.25 * LR),
        (False, LR),
    ):  # Adam's first step is the learning rate, whatever the gradient
        assert max(far for p, far in moved.items() if (p in own) == theirs) == pytest.approx(rate, rel=0.02)
    assert sorted({round(float(rate / LR), 4) for rate in step.rates}) == [0.25, 1.0]


class Fakes:
    """CUDA graphs that replay by calling the work again, on a machine without CUDA."""

    def __init__(self, monkeypatch, fails=()):
        self.captured, self.replayed, self.fails, self.recovered = [], 0, set(fails), 0
        fakes = self

        class Graph:
            def replay(self):
                fakes.replayed += 1

        @contextmanager
        def graph(made, **options):
            yield
            fakes.captured.append(made)
            if len(fakes.captured) in fakes.fails:
                raise RuntimeError("operation not permitted when stream is capturing\nand more")

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", graph)
        for name in ("synchronize", "graph_pool_handle", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, lambda *a: None)
        self.reserved = 2**30
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: self.reserved)
        monkeypatch.setattr(captures, "recover", lambda pool: setattr(self, "recovered", self.recovered + 1))


def test_first_turn_eager_then_captured_then_replayed(monkeypatch):
    fakes, calls, said = Fakes(monkeypatch), [], []
    held = Captures(said.append)
    for _ in range(4):
        held.run("a", lambda: calls.append("a"), seed=0)
    held.run("b", lambda: calls.append("b"), seed=0)
    assert calls == ["a", "a", "b"]  # eagerly, captured; b eagerly
    assert (len(fakes.captured), fakes.replayed, said) == (1, 3, [])


def test_what_graphs_hold_is_told(monkeypatch):
    """The first takes two GiB, the second finds room in the same pool; a capture that fails frees all."""
    fakes = Fakes(monkeypatch, fails=[3])
    held = Captures()

    def work():
        fakes.reserved = max(fakes.reserved, 3 * 2**30)

    for key in ("a", "a", "b", "b"):
        held.run(key, work if held.warm else lambda: None, seed=0)
    assert held.describe() == (
        "2 batch shapes captured as CUDA graphs, which share 2.0 GiB; 3.0 GiB of GPU memory held in all"
    )
    for _ in range(2):
        held.run("c", lambda: None, seed=0)
    assert held.describe().startswith("0 batch shapes captured as CUDA graphs, which share 0.0 GiB")


def test_what_cannot_be_captured_runs_eagerly_and_says_why(monkeypatch):
    fakes, calls, said = Fakes(monkeypatch, fails=[2]), [], []
    held = Captures(said.append)
    for _ in range(3):
        held.run("a", lambda: calls.append("a"), seed=0)
    for _ in range(4):
        held.run("b", lambda: calls.append("b"), seed=0)
    assert said == ["a step is not captured and runs eagerly: operation not permitted when stream is capturing"]
    assert list(held.refused) == ["b"]
    assert calls.count("b") == 5  # once eagerly, once in vain, then eagerly three times
    assert fakes.recovered == 1
    assert not held.graphs  # graphs that know the generator's old state are captured again
    held.run("a", lambda: calls.append("a"), seed=0)
    assert list(held.graphs) == ["a"]


def test_a_term_may_say_why_it_is_not_captured(monkeypatch):
    Fakes(monkeypatch)
    module, said = distiller(), []
    assert captures_of(module, said.append) is not None
    monkeypatch.setattr(Match, "uncapturable", "it asks the CPU")
    assert captures_of(module, said.append) is None
    assert said == ["steps are not captured and run eagerly: layers: it asks the CPU"]
    monkeypatch.setattr(Labels, "uncapturable", "it asks the CPU")
    assert captures_of(module, said.append) is None
    assert said[1:] == ["steps are not captured and run eagerly: labels, layers: it asks the CPU"]  # once, of both


@pytest.mark.parametrize(("how", "why"), [({"alone": False}, "processes wait"), ({"recomputed": True}, "generator")])
def test_what_keeps_steps_from_being_captured_is_said(how, why):
    said = []
    assert captures_of(distiller(), said.append, **how) is None
    assert [why in line for line in said] == [True]


def test_the_generator_is_reseeded_after_capturing(monkeypatch):
    """Capturing draws; the replay must start where the step's seed says."""
    Fakes(monkeypatch)
    seeds = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    held = Captures()
    for seed in (5, 6, 7):
        held.run("a", lambda: None, seed)
    assert seeds == [6]


def compiling(monkeypatch, fails=False):
    """torch.compile that compiles nothing, counts, or fails as one without a compiler does."""
    counted = []

    def compiled(forward, **options):
        def run(*args, **kwargs):
            if fails:
                from torch._dynamo.exc import InternalTorchDynamoError

                raise InternalTorchDynamoError("no C++ compiler\nlong story")
            counted.append(forward.__self__)
            return forward(*args, **kwargs)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    return counted


def test_blocks_are_compiled_while_running_only(monkeypatch):
    counted = compiling(monkeypatch)
    model = tiny_model("bert", 4)
    tap = Tap(model, [("hidden", 2), ("hidden", 3), ("attention", 2)])
    plain = tap(**tiny_batch(model))
    compiled = Compiled([tap])
    tap(**tiny_batch(model))
    assert not counted
    with compiled.running():
        found = tap(**tiny_batch(model))
    assert counted == [model.bert.encoder.layer[i] for i in (0, 2)]  # 2's attention is read, 4 is not run
    for site in plain:
        assert torch.equal(plain[site].values, found[site].values)
    tap(**tiny_batch(model))
    assert len(counted) == 2


def test_a_step_that_cannot_be_compiled_goes_on_without(monkeypatch):
    plain_module, plain = made()
    expected = run(plain, plain_module)
    compiling(monkeypatch, fails=True)
    module, step = made()
    said = []
    step.compiled, step.say = Compiled([module.tap]), said.append
    assert run(step, module) == expected
    assert said == ["blocks are not compiled: no C++ compiler"]


def test_another_error_is_not_taken_for_one_of_compiling(monkeypatch):
    module, step = made()
    step.compiled = Compiled([module.tap])
    monkeypatch.setattr(step, "_backward", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        run(step, module)


@pytest.mark.parametrize(("precision", "products"), [("no", "highest"), ("bf16", "high")])
def test_products_are_rounded_only_where_models_run_in_half_precision(precision, products, monkeypatch):
    seen = []
    module, step = made(precision)
    whole = step._whole
    monkeypatch.setattr(
        step, "_whole", lambda *given: (seen.append(torch.get_float32_matmul_precision()), whole(*given))
    )
    run(step, module, 1)
    assert seen == [products]
    assert torch.get_float32_matmul_precision() == "highest"
