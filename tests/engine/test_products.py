"""Our own linear maps, norms and embeddings give what torch's give, and gradients of weights lie where they should."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from limbeck.distiller import Distiller
from limbeck.engine import products
from limbeck.engine.beside import Beside
from limbeck.engine.blocks import Swapped
from limbeck.engine.forks import Forks
from limbeck.engine.half import Half
from limbeck.engine.products import Embedding, Leaf, frozen_forwards, joints, trained_forwards
from limbeck.objectives import Labels, Match
from tests.tiny import every_family, tiny_batch, tiny_model, tiny_pair, tiny_texts, two_sided

JOINED = set(every_family) - {"modernbert", "gpt2"}  # whose queries, keys and values are one map already


def leaves_of(model, joined):
    """Leaves in the model's own precision, joined as asked."""
    weights = dict(model.named_parameters())
    together = [[f"{one}.{part}" for one in maps] for maps in joined for part in ("weight", "bias")]
    together = [names for names in together if names[0] in weights]
    known = {name for names in together for name in names}
    made = []
    for names in [*together, *([name] for name in weights if name not in known)]:
        parts = [weights[name].detach() for name in names]
        copy = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
        made.append(Leaf(names, [len(part) for part in parts] if copy.dim() else [1], copy, torch.full_like(copy, 7.0)))
    return made


def differentiated(model, batch, joined):
    """The output and every weight's gradient, by our own products."""
    leaves = leaves_of(model, joined)
    by_name = {name: leaf for leaf in leaves for name in leaf.names}
    copies = {name: part for leaf in leaves for name, part in leaf.copies().items()}
    with Swapped(trained_forwards(model, joined, by_name, Beside(), Forks())).running():
        logits = functional_call(model, copies, kwargs=batch).logits
    logits.square().sum().backward()
    found = {}
    for leaf in leaves:
        elsewhere = leaf.tensor.grad if leaf.tensor.grad is not None else torch.zeros_like(leaf.tensor)
        total = leaf.gradient + elsewhere if leaf.written else elsewhere
        found |= dict(zip(leaf.names, total.split(leaf.rows) if len(leaf.rows) > 1 else [total]))
    return logits.detach(), found, leaves


def compare(model, batch):
    """Have our products differentiate as torch's do: the leaves they wrote."""
    model = model.double().eval()
    expected = model(**batch).logits
    expected.square().sum().backward()
    logits, found, leaves = differentiated(model, batch, joints(model))
    torch.testing.assert_close(logits, expected.detach(), atol=1e-12, rtol=1e-10)
    for name, weight in model.named_parameters():
        gradient = weight.grad if weight.grad is not None else torch.zeros_like(weight)
        torch.testing.assert_close(
            found[name], gradient, atol=1e-10, rtol=1e-8, msg=lambda said, n=name: f"{n}: {said}"
        )
    return leaves


@pytest.fixture(params=[False, True], ids=["by torch", "by a product"])
def tables(request, monkeypatch):
    """How gradients of embeddings are found: as on a CPU, or as on a GPU, whose kernels test_sums.py has."""
    if request.param:
        monkeypatch.setattr(products, "sums_for", lambda like: SimpleNamespace(worth=lambda rows: False))


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("family", every_family)
def test_own_products_are_torchs(family):
    model = tiny_model(family, 2)
    leaves = compare(model, {"input_ids": tiny_batch()["input_ids"]})
    assert bool(joints(model)) == (family in JOINED)
    assert sum(leaf.written for leaf in leaves) > 10  # most gradients came our way


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(
    ("family", "auto"),
    [("bert", AutoModelForMaskedLM), ("gpt2", AutoModelForCausalLM), ("qwen2", AutoModelForCausalLM)],
)
def test_a_head_that_shares_the_table_is_ours_too(family, auto):
    model = tiny_model(family, 2, auto=auto, tie_word_embeddings=True)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert table.weight is head.weight
    leaves = compare(model, {"input_ids": tiny_batch()["input_ids"]})
    (leaf,) = (leaf for leaf in leaves if leaf.tensor.shape == table.weight.shape)
    assert leaf.written
    assert leaf.tensor.grad is None


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("family", two_sided)
def test_two_sides_have_torchs_gradients(family):
    leaves = compare(tiny_pair(family, 2, 2), tiny_texts())
    assert sum(leaf.written for leaf in leaves) > 10


def test_embeddings_are_ours():
    model = tiny_model("bert", 1)
    leaves = compare(model, {name: tiny_batch()[name] for name in ("input_ids", "token_type_ids")})
    tables = {name for name, module in model.named_modules() if type(module) is nn.Embedding}
    assert len(tables) == 3
    for leaf in leaves:
        if leaf.names[0].removesuffix(".weight") in tables:
            assert leaf.written
            assert leaf.tensor.grad is None


def test_a_weight_used_twice_has_both_gradients():
    model = tiny_model("bert", 2).double().eval()
    batch = {"input_ids": tiny_batch()["input_ids"]}
    once = differentiated(model, batch, joints(model))[1]
    leaves = leaves_of(model, joints(model))
    by_name = {name: leaf for leaf in leaves for name in leaf.names}
    copies = {name: part for leaf in leaves for name, part in leaf.copies().items()}
    with Swapped(trained_forwards(model, joints(model), by_name, Beside(), Forks())).running():
        losses = [functional_call(model, copies, kwargs=batch).logits.square().sum() for _ in range(2)]
    sum(losses).backward()
    for leaf in leaves:
        if leaf.written:
            for name, gradient in leaf.gradients().items():
                torch.testing.assert_close(gradient, 2 * once[name], atol=1e-10, rtol=1e-8)


def test_a_map_asked_about_something_else_answers_for_that():
    model = tiny_model("bert", 1).double().eval()
    (names,) = joined = joints(model)
    leaves = leaves_of(model, joined)
    by_name = {name: leaf for leaf in leaves for name in leaf.names}
    one, other = torch.randn(2, 3, model.config.hidden_size, dtype=torch.float64)
    maps = [model.get_submodule(name) for name in names]
    expected = [maps[0](one), maps[1](other), maps[2](one)]
    with Swapped(trained_forwards(model, joined, by_name, Beside(), Forks())).running():
        found = [maps[0](one), maps[1](other), maps[2](one)]
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("family", sorted(JOINED))
def test_a_model_that_does_not_train_is_joined_too(family):
    model = tiny_model(family, 2).double().eval().requires_grad_(False)
    batch = {"input_ids": tiny_batch()["input_ids"]}
    expected = model(**batch).logits
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    forwards = frozen_forwards(model)
    assert len(forwards) == 3 * len(joints(model)) > 0
    with Swapped(forwards).running():
        torch.testing.assert_close(model(**batch).logits, expected, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(model(**batch).logits, expected, atol=1e-12, rtol=1e-10)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


@pytest.mark.parametrize("family", sorted(JOINED - {"deberta-v2"}) + sorted(two_sided))  # DeBERTa asks about positions
def test_joined_maps_multiply_once_and_hold_nothing_afterwards(family):
    model, batch = (tiny_pair(family, 2, 2), tiny_texts()) if family in two_sided else (tiny_model(family, 2), None)
    forwards = frozen_forwards(model.requires_grad_(False))
    batch = batch or {"input_ids": tiny_batch()["input_ids"]}
    with Swapped(forwards).running():
        model(**batch)
    for forward in forwards.values():
        assert forward.func.given is None
        assert not forward.func.made


def halves(own_products, change=lambda student: None):
    torch.manual_seed(0)
    student, teacher = tiny_model("bert", 2, seed=1).eval(), tiny_model("bert", 4)
    change(student)
    module = Distiller(teacher, student, {"labels": Labels(), "layers": Match("hidden", map="uniform")})
    half = Half(module, own_products=own_products)
    half.refresh()
    half(**tiny_batch()).loss.backward()
    half.settle()
    half.hand_over(add=False)
    return half


def attention_of(student, layer):
    return student.bert.encoder.layer[layer].attention.self


def without_a_bias(student):
    attention_of(student, 0).query.bias.requires_grad_(False)


def without_another_bias(student):
    attention_of(student, 0).value.bias.requires_grad_(False)


def with_one_weight_twice(student):
    attention_of(student, 1).key.weight = attention_of(student, 0).key.weight


@pytest.mark.parametrize(
    ("change", "joined"),
    [(lambda student: None, 2), (without_a_bias, 1), (without_another_bias, 1), (with_one_weight_twice, 1)],
)
def test_half_precision_is_near_torchs_products(change, joined):
    ours, theirs = halves(True, change), halves(False, change)
    assert sum(len(leaf.names) == 3 for leaf in ours.leaves) == 2 * joined
    assert all(len(leaf.names) == 1 for leaf in theirs.leaves)
    assert ours.gradients.keys() == theirs.gradients.keys()
    for name, gradient in theirs.gradients.items():
        assert (ours.gradients[name] - gradient).norm() <= 0.03 * gradient.norm() + 1e-3, name


@pytest.mark.parametrize("own_products", [True, False])
def test_a_backward_that_failed_leaves_no_gradient(own_products):
    half = halves(own_products)
    expected = half.made.clone()

    def fail(gradient):
        raise RuntimeError("cannot be captured")

    hook = half.distiller.student.base_model.encoder.layer[0].register_forward_hook(
        lambda module, given, out: out.register_hook(fail) and None
    )
    with pytest.raises(RuntimeError, match="cannot be captured"):
        half(**tiny_batch()).loss.backward()
    hook.remove()
    half(**tiny_batch()).loss.backward()
    half.settle()
    assert torch.equal(half.made, expected)


def test_gradients_that_nobody_found_are_zero():
    half = halves(True)
    half.made.fill_(7.0)
    half.settle()
    assert not half.made[: half.leaves[0].gradient.numel()].any()
    assert not any(leaf.gradient.any() for leaf in half.leaves)


def test_a_product_with_too_large_a_factor_is_left_to_torch(monkeypatch):
    """As of relative positions, which are as many as pairs of tokens, in a table of a few rows."""
    monkeypatch.setattr(products, "sums_for", lambda like: SimpleNamespace(worth=lambda rows: False))
    monkeypatch.setattr(products, "MANY", 0)
    monkeypatch.setattr(Leaf, "add_product", None)
    table = Leaf(["table"], [4], torch.randn(4, 3), torch.zeros(4, 3))
    ids = torch.tensor([[0, 1], [1, 3]])
    Embedding.apply(ids, table.tensor, table, Beside(), -1, False).sum().backward()
    assert table.gradient.tolist() == [[1.0] * 3, [2.0] * 3, [0.0] * 3, [1.0] * 3]
