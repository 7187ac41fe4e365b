"""Student layers compared with blends of teacher layers: ALP-KD's attention, CKD's combinations."""

import pytest
import torch

from tests.test_golden import Case, close, linear

RECIPES = {"alp-kd", "alp-kd:buckets", "alp-kd:overlap", "alp-kd:mean"}
RECIPES |= {"ckd-combine", *(f"ckd-combine:{kind}" for kind in ("overlap", "skip", "cross", "frozen"))}


def per_example(case, loss):
    """The mean over the examples of what `loss(i, n)` says of example i, which has n tokens."""
    return torch.stack([loss(i, int(n)) for i, n in enumerate(case.mask.sum(1))]).mean()


ALL = [(1, 2, 3, 4, 5)] * 2


@pytest.mark.parametrize(
    ("variant", "groups"),
    [("", ALL), (":mean", ALL), (":buckets", [(1, 2), (3, 4, 5)]), (":overlap", [(1, 2, 3), (2, 3, 4, 5)])],
)
@pytest.mark.parametrize("width", [32, 16])
def test_alp_kd(variant, groups, width):
    """A third each of CE, KL at T 2 and Σ over the inner layers of the MSE to Σ_k softmax_k⟨h_s, h_t^k⟩ h_t^k."""
    case = Case(f"alp-kd{variant}", width=width)
    pooled = case.pooled if variant == ":mean" else case.cls
    layers = 0
    for j, group in enumerate(groups):
        ours = pooled(case.s, j + 1)
        ours = ours if width == 32 else linear(case.aligner.maps[j], ours)
        energies = torch.stack([(ours * pooled(case.t, k)).sum(-1) for k in group], -1)
        shares = energies.exp() / energies.exp().sum(-1, keepdim=True)
        target = sum(shares[:, [i]] * pooled(case.t, k) for i, k in enumerate(group))
        layers = layers + (ours - target).square().mean()
    close(case.loss(), (case.ce() + case.kl(2) + layers) / 3)


@pytest.mark.parametrize(
    ("variant", "groups"),
    [
        ("", [(1, 2), (3, 4), (5, 6)]),
        (":frozen", [(1, 2), (3, 4), (5, 6)]),
        (":overlap", [(1, 2, 3), (2, 3, 4, 5), (4, 5, 6)]),
        (":skip", [(1,), (4,), (6,)]),
        (":cross", [(1,), (3,), (5,)]),
    ],
)
@pytest.mark.parametrize("width", [32, 16])
def test_ckd_combine(variant, groups, width):
    """0.1·CE + 0.2·KL + 0.7·Σ over layers of the MSE of every token to a linear map of its group's joined states."""
    case = Case(f"ckd-combine{variant}", width=width)
    maps = case.distiller.terms["layers"].blend.maps
    assert any(p.requires_grad for p in maps.parameters()) == (variant != ":frozen")
    for parameter in maps.parameters():
        torch.nn.init.normal_(parameter)
    layers = 0
    for j, group in enumerate(groups):
        joined = torch.cat([case.t.hidden_states[k] for k in group], -1)
        target = joined @ maps[j].weight.T + (0 if variant == ":frozen" else maps[j].bias)
        ours = case.s.hidden_states[j + 1]
        ours = ours if width == 32 else linear(case.aligner.maps[j], ours)
        layers = layers + per_example(case, lambda i, n, a=ours, b=target: (a[i, :n] - b[i, :n]).square().mean())
    close(case.loss(), 0.1 * case.ce() + 0.2 * case.kl(1) + 0.7 * layers)
