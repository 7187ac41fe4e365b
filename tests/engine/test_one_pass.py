"""Weights, moments and copies updated in one pass are what AdamW makes of them."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from limbeck.engine import one_pass
from limbeck.engine.step import prime, updating_at_once
from tests.engine.test_step import ADAM, made, run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_on_gpu.py has it")


def at_once(**options):
    module, step = made("bf16", **options)
    prime(step.optimizer)
    step.one_pass = updating_at_once(step.optimizer, step.half, step.direct)
    return module, step


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("constants", [{"clip": 0.0}, {"clip": 0.1}, ADAM, {"betas": [0.0, 0.9]}])
def test_one_pass_is_adamw(constants, pieces, monkeypatch):
    monkeypatch.setattr(one_pass, "BLOCK", 256)  # so that weights have full blocks and others
    (ours, first), (theirs, second) = at_once(**constants), made("bf16", **constants)
    assert {(copied, full) for _, copied, full in first.one_pass.chunks} == set(product((False, True), repeat=2))
    before = [p.detach().clone() for p in ours.parameters()]
    with first.running():
        run(first, ours.eval(), 2, pieces)
    run(second, theirs.eval(), 2, pieces)
    for (name, a), b, start in zip(ours.named_parameters(), theirs.parameters(), before):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5, msg=lambda said, n=name: f"{n}: {said}")
        assert not torch.equal(a, start)
    for place in first.one_pass.places:
        state = second.optimizer.state[dict(theirs.named_parameters())[named(ours, place.weight)]]
        for key, value in first.optimizer.state[place.weight].items():
            torch.testing.assert_close(value, state[key], atol=1e-7, rtol=1e-4)
        if place.copy is None:
            continue
        # The interpreter cuts digits off where a GPU rounds.
        torch.testing.assert_close(place.copy.float(), place.weight.detach(), atol=1e-6, rtol=1e-2)


def turned(weight):
    return weight.t().contiguous().t()


def shifted(weight):
    return torch.empty(weight.numel() + 1)[1:].view_as(weight).copy_(weight)


@pytest.mark.parametrize("change", [turned, shifted, torch.Tensor.double])
def test_weights_that_lie_otherwise_are_left_to_adamw(change):
    module, step = made("bf16")
    prime(step.optimizer)
    assert updating_at_once(step.optimizer, step.half, step.direct) is not None
    weight = module.student.classifier.weight
    weight.data = change(weight.data)
    assert updating_at_once(step.optimizer, step.half, step.direct) is None


def test_gathered_is_what_autograd_left():
    weights = [torch.zeros(3, requires_grad=True), torch.zeros(2, 5, requires_grad=True)]
    gathered = one_pass.Gathered(weights)
    for weight in weights:
        weight.grad = torch.rand_like(weight)
    flat = gathered.gather()
    assert all(torch.equal(part, weight.grad) for part, weight in zip(gathered.parts, weights))
    norm = torch.cat([weight.grad.flatten() for weight in weights]).norm()
    torch.testing.assert_close(flat.norm(), norm)
    assert all(part.data_ptr() % 16 == 0 for part in gathered.parts)
    weights[0].grad = None  # nothing of it may be left from before
    gathered.gather()
    assert not gathered.parts[0].any()
    assert torch.equal(gathered.parts[1], weights[1].grad)


def named(module, weight):
    return next(name for name, other in module.named_parameters() if other is weight)


def test_it_is_found_again_after_the_state_was_replaced():
    module, step = at_once()
    with step.running():
        run(step, module.eval(), 1)
    state = step.optimizer.state_dict()
    place = step.one_pass.places[0]
    step.optimizer.load_state_dict(
        {**state, "state": {i: {k: v.clone() for k, v in s.items()} for i, s in state["state"].items()}}
    )
    for group, rate in zip(step.optimizer.param_groups, step.rates):
        group["lr"] = rate
    step.one_pass.locate()
    moment = step.optimizer.state[place.weight]["exp_avg"]
    before = moment.clone()
    with step.running():
        run(step, module.eval(), 1)
    assert not torch.equal(before, moment)
    assert float(step.optimizer.state[place.weight]["step"]) == 2
