"""A residual sum and its norm in one kernel are torch's, and its dropout is dropout."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

pytest.importorskip("triton")

from limbeck import kernels
from limbeck.distiller import Distiller
from limbeck.engine import residual
from limbeck.engine.beside import Beside
from limbeck.engine.blocks import Swapped
from limbeck.engine.compiled import PAYS_FROM, pays
from limbeck.engine.dropout import Draws
from limbeck.engine.forks import Forks
from limbeck.engine.half import Half
from limbeck.engine.products import Leaf, joints, trained_forwards
from limbeck.engine.residual import Residual, frozen_residuals, residuals, trained_residuals
from limbeck.objectives import Labels, Match
from limbeck.taps import Tap
from tests.engine.test_products import leaves_of
from tests.tiny import every_family, tiny_batch, tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
# How many such modules a block has. ALBERT, DistilBERT and MPNet's attention add to a norm's input in forwards that do
# more; the others norm what enters a block.
TWO = {"bert", "roberta", "xlm-roberta", "electra", "deberta-v2"}
ONE = {"mpnet"}
INPUTS = ("input_ids", "attention_mask")
SITES = [("hidden", 0), ("hidden", 1), ("hidden", 2), ("scores", 1), ("logits", -1)]


def leaf(values):
    return Leaf(["one"], [len(values)], values.clone(), torch.full_like(values, 7.0))


def inputs(size, dtype=torch.float32, rows=(2, 3), seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(*rows, size, generator=generator) for _ in range(3)]
    weights = [torch.randn(size, generator=generator) for _ in range(2)]
    h, x, above, weight, bias = (t.to(DEVICE, dtype) for t in (*made, *weights))
    return h.requires_grad_(), x.requires_grad_(), above, leaf(weight), leaf(bias)


def run(h, x, weight, bias, p=0.0, draws=None):
    return Residual.apply(h, x, weight.tensor, bias.tensor, [weight, bias], Beside(), EPS, p, draws or Draws(), Forks())


def mask(out, p):
    """What was not dropped, of a sum of nothing and of ones."""
    z = out.grad_fn.saved_tensors[0]
    kept = z != 0
    torch.testing.assert_close(z[kept], torch.full_like(z[kept], 1 / (1 - p)))
    return kept


def masks(p, count=1, draws=None, rows=(32,), size=768):
    h, x, _, weight, bias = inputs(size, rows=rows)
    ones, draws = torch.ones_like(h).requires_grad_(), draws or Draws()
    return [mask(run(ones, torch.zeros_like(x), weight, bias, p, draws), p) for _ in range(count)]


@pytest.fixture(autouse=True)
def on_cpu_torch_keeps_means_in_half_precision(monkeypatch):
    if DEVICE == "cpu":
        own = residual.norm_gradients
        cast = lambda *given: own(*given[:4], *(t.to(given[3].dtype) for t in given[4:]))
        monkeypatch.setattr(residual, "norm_gradients", cast)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("size", [24, 768, 770])
def test_without_dropout_it_is_torchs(size, dtype, near):
    h, x, above, weight, bias = inputs(size, dtype)
    with torch.no_grad():
        x[0, 1] = -h[0, 1]  # a row that has no deviation
    out = run(h, x, weight, bias)
    out.backward(above)
    ours = [out.detach(), h.grad, x.grad, weight.gradient, bias.gradient]
    own = [t.detach().float().requires_grad_() for t in (h, x, weight.tensor, bias.tensor)]
    expected = F.layer_norm(own[0] + own[1], (size,), own[2], own[3], EPS)
    expected.backward(above.float())
    assert out.dtype == h.grad.dtype == dtype
    assert weight.written
    for a, b in zip(ours, [expected.detach(), *(t.grad for t in own)]):
        # The interpreter cuts digits off where a GPU rounds.
        assert (a.float() - b).norm() <= near * b.norm()
    assert torch.equal(out[0, 1], bias.tensor)


def test_it_takes_what_does_not_lie_in_one_piece():
    h, x, above, weight, bias = inputs(24, rows=(3, 3))
    turned, shared = h.transpose(0, 1), x[:1].expand(3, 3, 24)
    out = run(turned, shared, weight, bias)
    torch.testing.assert_close(out, F.layer_norm(turned + shared, (24,), weight.tensor, bias.tensor, EPS))
    out.backward(above[0, 0].expand(3, 3, 24))
    ours, h.grad = h.grad, None
    F.layer_norm(turned + shared, (24,), weight.tensor, bias.tensor, EPS).backward(above[0, 0].expand(3, 3, 24))
    torch.testing.assert_close(ours, h.grad)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_every_number_is_dropped_as_often_and_alone(p):
    torch.manual_seed(0)
    (kept,) = masks(p, rows=(64,))
    assert abs(float(kept.float().mean()) - (1 - p)) < 0.01
    eighths = kept.view(-1, 8).float()
    assert (eighths.mean(0) - (1 - p)).abs().max() < 0.03
    assert (eighths.T.corrcoef() - torch.eye(8, device=DEVICE)).abs().max() < 0.06
    assert abs(float(kept.flatten().float().unfold(0, 2, 1).prod(1).mean()) - (1 - p) ** 2) < 0.01
    assert not torch.equal(kept[0], kept[1])


@pytest.mark.parametrize("size", [24, 770])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_backward_drops_what_forward_dropped(p, size):
    h, x, above, weight, bias = inputs(size, rows=(4,))
    torch.manual_seed(5)
    (kept,) = masks(p, rows=(4,), size=size)
    torch.manual_seed(5)
    out = run(h, x, weight, bias, p)
    out.backward(above)
    assert torch.equal(h.grad != 0, kept)
    assert 0 < kept.sum() < kept.numel()
    own = [t.detach().clone().requires_grad_() for t in (h, x, weight.tensor, bias.tensor)]
    expected = F.layer_norm(own[1] + own[0] * kept / (1 - p), (size,), own[2], own[3], EPS)
    expected.backward(above)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    for a, b in zip([h.grad, x.grad, weight.gradient, bias.gradient], own):
        torch.testing.assert_close(a, b.grad, atol=1e-5, rtol=1e-4)


def test_a_seed_fixes_all_masks_and_no_two_are_alike():
    draws = Draws()

    def forward():
        draws.begin()
        return masks(0.5, 2, draws, rows=(12,))

    torch.manual_seed(1)
    found = [*forward(), *forward()]
    torch.manual_seed(1)
    again = [*forward(), *forward()]
    torch.manual_seed(2)
    found += forward()
    assert all(torch.equal(a, b) for a, b in zip(found, again))
    for i, one in enumerate(found):
        for other in found[:i]:
            assert abs(float((one == other).float().mean()) - 0.5) < 0.03  # as chance has it


def test_what_does_not_drop_draws_nothing():
    h, x, _, weight, bias = inputs(24)
    before, draws = torch.get_rng_state(), Draws()
    run(h, x, weight, bias, 0.0, draws)
    assert draws.seed is None
    assert torch.equal(before, torch.get_rng_state())


def batch_for(model):
    return {name: column.to(DEVICE) for name, column in tiny_batch(model).items() if name in INPUTS}


@pytest.mark.parametrize("family", every_family)
def test_a_model_that_does_not_train_gives_the_same(family):
    model = tiny_model(family, 2).eval().requires_grad_(False).to(DEVICE)
    forwards = frozen_residuals(model)
    assert len(forwards) == 2 * (2 if family in TWO else 1 if family in ONE else 0)
    if not forwards:
        return
    batch = batch_for(model)
    tap = Tap(model, SITES)
    expected = tap(**batch)
    with Swapped(forwards).running(), torch.no_grad():
        found = tap(**batch)
    for site in SITES:
        torch.testing.assert_close(found[site].values, expected[site].values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", sorted(TWO | ONE))
def test_a_model_that_trains_gives_the_same(family):
    model = tiny_model(family, 2).eval().to(DEVICE)
    batch = batch_for(model)
    expected = model(**batch).logits
    expected.square().sum().backward()
    leaves, draws, forks = leaves_of(model, joined := joints(model)), Draws(), Forks()
    by_name = {name: leaf for leaf in leaves for name in leaf.names}
    forwards = trained_residuals(model, by_name, Beside(), draws, forks)
    assert len(forwards) == len(residuals(model)) > 0
    copies = {name: part for leaf in leaves for name, part in leaf.copies().items()}
    with Swapped(trained_forwards(model, joined, by_name, Beside(), forks) | forwards).running():
        logits = functional_call(model, copies, kwargs=batch).logits
        logits.square().sum().backward()
    assert len(forks.joined) == len(forwards)  # each of them shares its input with a product
    forks.settle()
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    weights = dict(model.named_parameters())
    for leaf in leaves:
        theirs = torch.cat([weights[name].grad for name in leaf.names])
        found = [leaf.gradient if leaf.written else None, leaf.tensor.grad]  # DeBERTa's maps are asked twice
        ours = sum(part for part in found if part is not None)
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm() + 1e-4, leaf.names
    norms = [by_name[f"{name}.LayerNorm.weight"] for name in residuals(model)]
    assert all(leaf.written and leaf.tensor.grad is None for leaf in norms)
    assert draws.seed is None


class Unjoined(Forks):
    """Every sum hands its gradient to autograd."""

    def join(self, x):
        return None


def test_a_gradient_that_waits_for_the_product_is_added_once():
    """With dropout, when the product adds to it in place."""
    model = tiny_model("bert", 2).train().to(DEVICE)
    batch, found = batch_for(model), []
    for forks in (Forks(), Unjoined()):
        leaves, draws = leaves_of(model, joined := joints(model)), Draws()
        by_name = {name: leaf for leaf in leaves for name in leaf.names}
        forwards = trained_forwards(model, joined, by_name, Beside(), forks)
        forwards |= trained_residuals(model, by_name, Beside(), draws, forks)
        copies = {name: part for leaf in leaves for name, part in leaf.copies().items()}
        torch.manual_seed(0)
        with Swapped(forwards).running():
            functional_call(model, copies, kwargs=batch).logits.square().sum().backward()
        assert len(forks.joined) == (4 if type(forks) is Forks else 0)
        assert draws.asked == 4
        forks.settle()
        found.append({name: part.clone() for leaf in leaves for name, part in leaf.gradients().items() if leaf.written})
    assert len(found[0]) > 20
    for name in found[0]:
        torch.testing.assert_close(*(one[name] for one in found), atol=1e-4, rtol=1e-4)


def test_a_gradient_left_behind_is_noticed():
    forks, x = Forks(), torch.ones(2, 4)
    forks.open(x)
    forks.join(x).leave(torch.ones(2, 4), shared=False)
    with pytest.raises(RuntimeError, match="left behind"):
        forks.settle()
    assert forks.join(x) is None  # one sum a product
    forks.settle()


def test_a_norm_that_does_not_train_is_left_alone():
    model = tiny_model("bert", 2)
    by_name = {name: leaf for leaf in leaves_of(model, []) for name in leaf.names}
    del by_name["bert.encoder.layer.0.output.LayerNorm.bias"]
    forwards = trained_residuals(model, by_name, Beside(), Draws(), Forks())
    assert model.bert.encoder.layer[0].output not in forwards
    assert len(forwards) == 3


class Right(nn.Module):
    def __init__(self, size=16, **options):
        super().__init__()
        self.dense, self.dropout = nn.Linear(8, size), nn.Dropout(0.1)
        self.LayerNorm = nn.LayerNorm(size, **options)

    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)


class DropsTheSum(Right):
    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states) + input_tensor))


class DropsTheNorm(Right):
    def forward(self, hidden_states, input_tensor):
        return self.dropout(self.LayerNorm(self.dense(hidden_states) + input_tensor))


class DropsWithoutItsPart(Right):
    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(F.dropout(self.dense(hidden_states), 0.1, self.training) + input_tensor)


class NormsBefore(Right):
    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states))) + input_tensor


class Weighs(Right):
    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + 2 * input_tensor)


class Answers(Right):
    def forward(self, hidden_states, input_tensor):
        return (super().forward(hidden_states, input_tensor),)


class TakesMore(Right):
    def forward(self, hidden_states, input_tensor, scale=1.0):
        return super().forward(hidden_states, input_tensor) * scale


class HasMore(Right):
    def __init__(self):
        super().__init__()
        self.activation = nn.GELU()


def watched():
    module = Right()
    module.LayerNorm.register_forward_hook(lambda *seen: None)
    return module


UNLIKE = [DropsTheSum, DropsTheNorm, DropsWithoutItsPart, NormsBefore, Weighs, Answers, TakesMore, HasMore, watched]
UNLIKE += [lambda: Right(bias=False), lambda: Right(elementwise_affine=False), lambda: Right(residual.WIDEST + 1)]


@pytest.mark.parametrize("make", UNLIKE)
def test_what_computes_anything_else_is_left_alone(make):
    alike, unlike = Right(), make()
    assert [*residuals(nn.ModuleList([alike, unlike])).values()] == [alike]
    assert "forward" not in alike.__dict__


def half():
    torch.manual_seed(0)
    student, teacher = tiny_model("bert", 1, seed=1), tiny_model("bert", 2)
    module = Distiller(teacher, student, {"labels": Labels(), "layers": Match("hidden", map="uniform")}).to(DEVICE)
    made = Half(module)
    made.refresh()
    return made


def gradients(half, seed):
    torch.manual_seed(seed)
    half(**{name: column.to(DEVICE) for name, column in tiny_batch(sizes=(4, 2)).items()}).loss.backward()
    half.settle()
    return half.made.clone()


def with_residuals(half):
    """The same, as on a GPU."""
    by_name = {name: leaf for leaf in half.leaves for name in leaf.names}
    half.swapped.forwards |= trained_residuals(half.distiller.student, by_name, half.beside, half.draws, half.forks)
    return half


def test_half_precision_is_near_torchs():
    plain, ours = half(), with_residuals(half())
    found = residuals(ours.distiller.student)
    for module in residuals(plain.distiller.student).values():
        plain.swapped.forwards.pop(module, None)
    for one in (plain, ours):
        one.distiller.eval()
    expected = gradients(plain, 0).float()
    # The interpreter cuts digits off where a GPU rounds, layer after layer.
    assert (gradients(ours, 0) - expected).norm() <= 0.05 * expected.norm()
    assert ours.draws.seed is None
    ours.distiller.student.train()
    one, same, other = (gradients(ours, seed) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert ours.draws.asked == len(found) == 2


def test_a_backward_that_failed_leaves_nothing_to_the_next():
    """As where a step cannot be captured, and runs eagerly then."""
    ran = with_residuals(half())
    expected = gradients(ran, 3)

    def fail(gradient):
        raise RuntimeError("cannot be captured")

    inside = ran.distiller.student.bert.encoder.layer[0].intermediate
    hook = inside.register_forward_hook(lambda module, given, out: out.register_hook(fail) and None)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        gradients(ran, 3)
    hook.remove()
    assert any(fork.waiting is not None for fork in ran.forks.joined)
    assert torch.equal(gradients(ran, 3), expected)


def test_without_kernels_modules_run_as_they_are():
    assert not kernels.run_on(torch.device("cpu"))
    if DEVICE == "cpu":
        ran = half()
        assert not set(residuals(ran.distiller.student).values()) & ran.swapped.forwards.keys()


def test_blocks_with_kernels_of_ours_are_not_compiled(monkeypatch):
    bert, gpt2 = tiny_model("bert", 1), tiny_model("gpt2", 1)
    assert pays(bert, PAYS_FROM, alone=True) == (not kernels.run_on(bert.device))
    monkeypatch.setattr(kernels, "run_on", lambda device: True)
    assert not pays(bert, PAYS_FROM, alone=True)
    assert pays(bert, PAYS_FROM, alone=False)  # where several processes train, modules run as they are
    assert pays(gpt2, PAYS_FROM, alone=True)
    assert not pays(gpt2, PAYS_FROM - 1, alone=True)
