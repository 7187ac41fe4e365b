"""Sums made by kernels are what a loop adds up, and what torch finds. In Triton's interpreter where there is no GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton")

from limbeck.engine import products, sums
from limbeck.engine.beside import Beside
from limbeck.engine.forks import Forks
from limbeck.engine.products import Embedding, Leaf, Norm, trained_forwards

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = {"atol": 1e-6, "rtol": 2**-7}  # the interpreter cuts digits off where a GPU rounds
SIZES = [(1, 2), (7, 50), (2048, 2), (600, 98)] + [(2048, 768), (1030, 770), (4097, 3072)] * torch.cuda.is_available()


def drawn(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def strided(rows, columns, seed=0):
    """Rows that are parts of longer ones."""
    return drawn(rows, 3 * columns, seed=seed)[:, columns : 2 * columns]


def added(rows):
    """The sum of rows, one after another."""
    total = torch.zeros_like(rows[0], dtype=torch.float64)
    for row in rows:
        total += row.double()
    return total.float()


def tolerance(rows):
    """What the order of as many additions in fp32 may change."""
    return {"atol": 1e-6 * rows, "rtol": 1e-5}


@pytest.mark.parametrize("make", [drawn, strided])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_columns_are_added(rows, columns, make):
    given = make(rows, columns)
    out = drawn(columns, dtype=torch.float32, seed=1)
    before = out.clone()
    sums.add_columns(given, out, True)
    torch.testing.assert_close(out, before + added(given), **tolerance(rows))
    sums.add_columns(given, out, False)
    torch.testing.assert_close(out, added(given), **tolerance(rows))
    half = drawn(columns, seed=1)
    sums.add_columns(given, half, False)
    torch.testing.assert_close(half.float(), out, **HALF)


def test_nothing_is_written_beside_the_sum():
    out = torch.full((64,), 7.0, device=DEVICE)
    sums.add_columns(drawn(5, 18), out[16:34], False)
    assert (out[:16] == 7).all()
    assert (out[34:] == 7).all()


@pytest.mark.parametrize("make", [drawn, strided])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_norms_are_added(rows, columns, make):
    above, x = make(rows, columns), make(rows, columns, seed=1) * 3 + 2
    normed, mean, rstd = torch.native_layer_norm(x.float(), (columns,), None, None, 1e-3)
    scale, shift = (drawn(columns, dtype=torch.float32, seed=seed) for seed in (2, 3))
    before = shift.clone()
    sums.add_norm(above, x, mean, rstd, (scale, False), (shift, True))
    torch.testing.assert_close(scale, added(above.float() * normed), **tolerance(3 * rows))
    torch.testing.assert_close(shift, before + added(above), **tolerance(rows))
    sums.add_norm(above, x, mean, rstd, (scale, True), (shift, False))
    torch.testing.assert_close(scale, 2 * added(above.float() * normed), **tolerance(6 * rows))
    torch.testing.assert_close(shift, added(above), **tolerance(rows))


ONE_OFTEN = [3] * 75 + [5, 0, 49, 5] + [7] * 33 + list(range(20, 40))
IDS = {
    "all alike": [4] * 70,
    "all other": list(range(50))[::-1],
    "one often": ONE_OFTEN,
    "shuffled": [ONE_OFTEN[i * 37 % len(ONE_OFTEN)] for i in range(len(ONE_OFTEN))],
    "one": [49],
}


@pytest.mark.parametrize("padding", [-1, 0, 4])
@pytest.mark.parametrize("columns", [2, 768 if DEVICE == "cuda" else 264])
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())
def test_rows_are_added_by_id(ids, columns, padding):
    rows = strided(len(ids), columns)
    table = drawn(50, columns, dtype=torch.float32, seed=1)
    expected = table.clone()
    for row, place in zip(rows, ids):
        if place != padding:
            expected[place] += row.float()
    given = torch.tensor(ids, device=DEVICE)
    theirs = table + torch.ops.aten.embedding_dense_backward(rows.float(), given, 50, padding, False)
    sums.add_by_id(rows, sums.segments(given), table, padding)
    torch.testing.assert_close(table, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(table, theirs, atol=1e-4, rtol=1e-5)


def test_a_table_in_half_precision_is_rounded_once():
    rows, ids = drawn(100, 16), torch.arange(100, device=DEVICE) % 3
    table = torch.zeros(5, 16, dtype=torch.bfloat16, device=DEVICE)
    sums.add_by_id(rows, sums.segments(ids), table, -1)
    expected = torch.stack([added(rows[ids == place]) for place in range(3)])
    torch.testing.assert_close(table[:3].float(), expected, **HALF)
    assert not table[3:].any()


def leaf_of(copy):
    return Leaf(["weight"], [len(copy)], copy, torch.full_like(copy, 7.0))


@pytest.fixture
def by_kernels(monkeypatch):
    """Kernels wherever a GPU would have them, and tables that are none too small."""
    monkeypatch.setattr(products, "sums_for", lambda like: sums)
    monkeypatch.setattr(products, "SMALL", 4)


@pytest.mark.usefixtures("by_kernels")
def test_leaves_are_written_then_added_to():
    rows, leaf = drawn(100, 24), leaf_of(drawn(24))
    for times in (1, 2):
        leaf.add_sum(rows)
        torch.testing.assert_close(leaf.gradient.float(), times * added(rows), **HALF)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("shape", [(24,), (5, 24), (3, 4, 24)])
def test_a_norm_has_torchs_gradients(shape):
    x, above = drawn(*shape).float(), drawn(*shape, seed=1).float()
    own = [drawn(24, dtype=torch.float32, seed=seed) for seed in (2, 3)]
    leaves = [leaf_of(weight.clone()) for weight in own]
    found = Norm.apply(x, *(leaf.tensor for leaf in leaves), leaves, Beside(), 1e-5)
    weights = [weight.requires_grad_() for weight in own]
    expected = F.layer_norm(x, (24,), *weights)
    torch.testing.assert_close(found, expected)
    found.backward(above)
    expected.backward(above)
    for leaf, weight in zip(leaves, weights):
        torch.testing.assert_close(leaf.gradient, weight.grad, atol=1e-5, rtol=1e-5)


SHAPES = {"batch": (3, 9), "shared": (1, 9), "flat": (9,), "one": (), "square": (2, 3, 3)}


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("size", [3, 60])  # by a product, and by its kernel
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_an_embedding_has_torchs_gradient(shape, padding, size):
    ids = torch.randint(0, min(size, 5), shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weight = drawn(size, 8, dtype=torch.float32)
    leaf = leaf_of(weight.clone())
    found = Embedding.apply(ids, leaf.tensor, leaf, Beside(), -1 if padding is None else padding, False)
    expected = F.embedding(ids, weight.requires_grad_(), padding)
    assert torch.equal(found, expected)
    alike = drawn(8, dtype=torch.float32, seed=1).expand_as(found)  # the same for every id
    across = drawn(8, *shape, dtype=torch.float32, seed=2).movedim(0, -1)  # columns lie where rows should
    for above in (alike, across):
        found.backward(above, retain_graph=True)
        expected.backward(above, retain_graph=True)
        torch.testing.assert_close(leaf.gradient, weight.grad, atol=1e-5, rtol=1e-5)


class Tied(nn.Module):
    """A head that shares the embeddings' table."""

    def __init__(self, size):
        super().__init__()
        self.words = nn.Embedding(size, 8, padding_idx=1)
        self.head = nn.Linear(8, size)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.words(ids).tanh())


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("size", [4, 60])
def test_a_shared_table_has_all_its_gradients(size, uses):
    model = Tied(size).to(DEVICE)
    ids = torch.tensor([[0, 1, 2, 2, 3], [3, 3, 3, 1, 0]], device=DEVICE)
    leaves = {name: leaf_of(weight.detach().clone()) for name, weight in model.named_parameters()}
    forwards = trained_forwards(model, [], leaves, Beside(), Forks())
    assert set(forwards) == {model.words, model.head}
    for _ in range(uses):
        forwards[model.head](forwards[model.words](ids).tanh()).square().sum().backward()
        model(ids).square().sum().backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(leaves[name].gradient, weight.grad, atol=1e-4, rtol=1e-4)
        assert leaves[name].tensor.grad is None


def test_embeddings_that_do_more_are_left_alone():
    class Scaled(nn.Embedding):
        pass

    more = [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}]
    model = nn.ModuleList([Scaled(9, 4), *(nn.Embedding(9, 4, **one) for one in more), nn.Embedding(9, 4)])
    leaves = {name: leaf_of(weight.detach()) for name, weight in model.named_parameters()}
    assert list(trained_forwards(model, [], leaves, Beside(), Forks())) == [model[-1]]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("size", [1000, 4000])  # by a product, and by its kernel
def test_captured_is_eager(size):
    """To the last bit, also when other numbers lie where the captured ones did."""
    ids, above = torch.zeros(32, 64, dtype=torch.long, device=DEVICE), drawn(32, 64, 768)
    table, scale, shift = leaf_of(drawn(size, 768)), leaf_of(drawn(768)), leaf_of(drawn(768))
    beside = Beside()

    def work():
        for leaf in (table, scale, shift):
            leaf.written = False
        found = Embedding.apply(ids, table.tensor, table, beside, 0, False)
        Norm.apply(found, scale.tensor, shift.tensor, (scale, shift), beside, 1e-5).backward(above)
        beside.join()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            work()
        for seed in range(3):
            ids.random_(0, size, generator=torch.Generator(DEVICE).manual_seed(seed))
            ids[seed] = seed
            work()
            expected = [leaf.gradient.clone() for leaf in (table, scale, shift)]
            graph.replay()
            for leaf, gradient in zip((table, scale, shift), expected):
                assert torch.equal(leaf.gradient, gradient)
    assert beside.apart.stream is not None
