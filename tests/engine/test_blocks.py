"""Recomputed blocks: the same losses and gradients, dropout included, and far fewer activations kept."""

import pytest
import torch

from limbeck import Distiller
from limbeck.engine.blocks import Recomputed
from limbeck.objectives import Labels, Logits, Match
from tests.tiny import every_family, tiny_batch, tiny_model


def distiller(family, **options):
    """Labels, logits, token states and attention, the last of the last block too."""
    objectives = {
        "labels": Labels("cross_entropy"),
        "logits": Logits("kl(temperature=2)"),
        "hidden": Match("hidden", map="uniform", distance="mse"),
        "attention": Match("attention", map="last", distance="kl"),
    }
    student = tiny_model(family, layers=2, seed=1, **options)
    return Distiller(tiny_model(family), student, objectives).train()


def learn(module, batch, running=None):
    """Parts and gradients of a step, and the bytes that were kept for the backward."""
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    module.zero_grad()
    torch.manual_seed(3)
    weights = {weight.data_ptr() for weight in module.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if running is None:
            output = module(**batch)
        else:
            with running.running():
                output = module(**batch)
    output.loss.backward()
    size = sum(bytes for place, bytes in kept.items() if place not in weights)
    return output.parts, {n: p.grad for n, p in module.named_parameters() if p.grad is not None}, size


@pytest.mark.parametrize("family", every_family)
def test_losses_and_gradients_are_the_same(family):
    module = distiller(family)
    assert_recomputed_is_plain(module, tiny_batch(module.student, sizes=(9, 5, 7, 9)))


def assert_recomputed_is_plain(module, batch):
    """Losses bit for bit, gradients but for the order of sums, and less is kept."""
    parts, gradients, size = learn(module, batch)
    gradients = {name: value.clone() for name, value in gradients.items()}
    again, others, less = learn(module, batch, Recomputed(module.student))
    assert {n: p.item() for n, p in again.items()} == {n: p.item() for n, p in parts.items()}
    assert others.keys() == gradients.keys()
    for name, value in gradients.items():
        torch.testing.assert_close(others[name], value, rtol=0, atol=1e-6)
    assert less < size


def test_blocks_are_their_own_again_afterwards():
    module = distiller("bert")
    before = [block.forward for block in module.student.bert.encoder.layer]
    with Recomputed(module.student).running():
        assert [block.forward for block in module.student.bert.encoder.layer] != before
    assert [block.forward for block in module.student.bert.encoder.layer] == before
