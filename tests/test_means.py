"""Means of tokens by one kernel are torch's. In Triton's interpreter where there is no GPU."""

import pytest
import torch

pytest.importorskip("triton")

from limbeck import features, kernels
from limbeck.features import Seen
from limbeck.means import token_means

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Tokens of each example: none at all, one, as many as a tile holds and one more.
LENGTHS = {"short": [3, 1, 0], "a tile": [64, 2], "two tiles": [65, 70, 64]}


def made(lengths, width, dtype):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(len(lengths), max(lengths), width, generator=generator).to(DEVICE, dtype).requires_grad_()
    return states, torch.arange(max(lengths), device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 100])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_values_and_gradients(lengths, width, dtype):
    states, mask = made(lengths, width, dtype)
    above = torch.randn(len(lengths), width, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found = token_means(states, mask)
    found.backward(above)
    gradient, states.grad = states.grad, None
    wanted = torch.stack([rows[:n].float().sum(0) / max(n, 1) for rows, n in zip(states, lengths)])
    wanted.backward(above)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted)
    assert gradient.dtype == dtype
    # The interpreter cuts digits off where a GPU rounds.
    torch.testing.assert_close(gradient, states.grad, **({"atol": 1e-6, "rtol": 1e-2} if dtype.itemsize == 2 else {}))


def test_what_padding_holds_does_not_count():
    states, mask = made([3, 1], 64, torch.float32)
    spoilt = torch.where(mask[:, :, None], states.detach(), float("nan"))
    torch.testing.assert_close(token_means(spoilt, mask), token_means(states.detach(), mask))


def test_the_feature_asks_the_kernel(monkeypatch):
    states, mask = made([5, 9], 64, torch.bfloat16)
    found = {}
    for runs in (True, False):
        monkeypatch.setattr(kernels, "run_on", lambda device, runs=runs: runs)
        found[runs] = features.mean(Seen(mask=mask, hidden={2: states}), 2).values
    assert type(found[True].grad_fn).__name__ == "MeansBackward"
    assert type(found[False].grad_fn).__name__ != "MeansBackward"
    torch.testing.assert_close(found[True], found[False])
