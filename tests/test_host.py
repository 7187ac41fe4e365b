"""A forward neither asks the device for a value nor copies one to it: a step that does cannot be captured.

Models run here on torch's device without values: what asks for one raises, and tensors of the host can be told apart.
"""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from limbeck import taps
from limbeck.features import LOGITS
from limbeck.taps import Tap
from tests.tiny import every_family, tiny_batch, tiny_model, tiny_pair, tiny_texts, two_sided


class Mixing(TorchDispatchMode):
    """Notes the operations between a tensor of the host and the device; a single number is passed on, not copied."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        copied = function is torch.ops.aten._to_copy.default
        if len({t.device.type for t in tensors if t.dim() or copied}) > 1:
            self.found.append(str(function))
        return result


@pytest.mark.parametrize("family", [*every_family, *two_sided])
@pytest.mark.parametrize("names", [("hidden",), ("hidden", "scores")])
def test_a_forward_takes_nothing_from_the_host(family, names, monkeypatch):
    monkeypatch.setattr(taps, "full_precision", lambda like: nullcontext())  # autocast knows no such device
    model = tiny_pair(family) if family in two_sided else tiny_model(family)
    batch = tiny_texts() if family in two_sided else tiny_batch(model)
    tap = Tap(model, [*((name, 2) for name in names), ("logits", LOGITS)])
    model.to("meta").train()
    batch = {name: column.to("meta") for name, column in batch.items()}
    tap(**batch)  # what is made once a length
    with Mixing() as mixing:
        tap(**batch)
    assert not mixing.found


def test_a_copy_is_noticed():
    with Mixing() as mixing:
        torch.ones(3).to("meta")
        torch.tensor(0.0).to("meta")
    assert len(mixing.found) == 2
