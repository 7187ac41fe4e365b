"""Squared differences by one kernel are torch's, of rows and of their unit vectors."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from limbeck import distances, kernels
from limbeck.squares import mean_squares, unit_squares

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rows(*shape, dtype, seed):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, dtype).requires_grad_()


def unit(rows):
    return F.normalize(rows, dim=-1)


WAYS = {
    "squares": (mean_squares, lambda s, t: (s - t).square().mean(-1)),
    "unit squares": (lambda s, t: unit_squares(s, t, mean=True), lambda s, t: (unit(s) - unit(t)).square().mean(-1)),
    "summed": (lambda s, t: unit_squares(s, t, mean=False), lambda s, t: (unit(s) - unit(t)).square().sum(-1)),
}


@pytest.mark.parametrize("precisions", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
                                        (torch.float32, torch.bfloat16)])  # fmt: skip
@pytest.mark.parametrize("shape", [(3, 5, 64), (1, 100), (2, 3, 2, 770)])
@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients(way, shape, precisions):
    ours_by, theirs_by = WAYS[way]
    ours, theirs = (rows(*shape, dtype=dtype, seed=i) for i, dtype in enumerate(precisions))
    above = torch.randn(shape[:-1], generator=torch.Generator().manual_seed(7)).to(DEVICE)
    found = ours_by(ours, theirs)
    found.backward(above)
    made, ours.grad, theirs.grad = (ours.grad, theirs.grad), None, None
    wanted = theirs_by(ours.float(), theirs.float())
    wanted.backward(above)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted)
    for gradient, tensor in zip(made, (ours, theirs)):
        assert gradient.dtype == tensor.dtype
        # The interpreter cuts digits off where a GPU rounds.
        rough = {"atol": 1e-6, "rtol": 1e-2} if tensor.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(gradient, tensor.grad, **rough)


def test_a_side_that_does_not_train_has_no_gradient():
    ours, theirs = (rows(4, 64, dtype=torch.float32, seed=i) for i in range(2))
    mean_squares(ours, theirs.detach()).sum().backward()
    assert ours.grad is not None
    mean_squares(ours.detach(), theirs).sum().backward()
    torch.testing.assert_close(theirs.grad, -ours.grad)


def test_what_has_no_direction_is_torchs_too():
    """A row of zeros, and one that is too short to be told from it."""
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.0], [1e-20], [1.0]])
    ours, theirs = (one.clone().to(DEVICE).requires_grad_() for one in (rows, rows.flip(0)))
    found = unit_squares(ours, theirs, mean=False)
    found.sum().backward()
    made, ours.grad, theirs.grad = (ours.grad, theirs.grad), None, None
    wanted = (unit(ours) - unit(theirs)).square().sum(-1)
    wanted.sum().backward()
    torch.testing.assert_close(found, wanted)
    for gradient, tensor in zip(made, (ours, theirs)):
        torch.testing.assert_close(gradient, tensor.grad)


@pytest.mark.parametrize("name", ["unit_mse", "unit_sq"])
def test_distances_of_directions_ask_the_kernel(name, monkeypatch):
    monkeypatch.setattr(kernels, "run_on", lambda device: True)
    ours, theirs = (rows(4, 64, dtype=torch.bfloat16, seed=i) for i in range(2))
    found = distances.DISTANCES[name](ours, theirs)
    assert type(found.grad_fn).__name__ == "SquaresBackward"
    monkeypatch.setattr(kernels, "run_on", lambda device: False)
    torch.testing.assert_close(found, distances.DISTANCES[name](ours.float(), theirs.float()))


def test_mse_takes_half_precision_as_it_is():
    ours, theirs = (rows(4, 64, dtype=torch.bfloat16, seed=i) for i in range(2))
    found = distances.mse(ours, theirs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, (ours.float() - theirs.float()).square().mean(-1))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_rows_on_another_gpu_than_the_current():
    ours, theirs = torch.randn(2, 5, 64, device="cuda:1")
    torch.testing.assert_close(distances.mse(ours, theirs), (ours - theirs).square().mean(-1))


def test_a_kernel_is_launched_where_the_rows_are(monkeypatch):
    entered = []

    class Of:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            entered.append(self.tensor)

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(torch.cuda, "device_of", Of)
    rows = torch.ones(2, 64, device=DEVICE)
    mean_squares(rows, rows)
    assert entered
    assert entered[0] is rows
