"""Every feature against loops over examples, heads, queries and keys. A feature without such a loop fails."""

import math
from dataclasses import replace

import pytest
import torch

from limbeck.features import FEATURES, LOGITS, Attention, Rows, Seen

SIZES, LENGTH, WIDTH, HEADS, LABELS = (6, 3, 5), 6, 12, 4, 3
LAYER = 2


def seen_of(dtype=torch.float64, seed=0, bias=True):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(len(SIZES), *shape, generator=generator, dtype=torch.float64).to(dtype)

    mask = torch.arange(LENGTH) < torch.tensor(SIZES)[:, None]
    size = WIDTH // HEADS
    return Seen(
        mask=mask,
        hidden={layer: draw(LENGTH, WIDTH) for layer in (0, LAYER)},
        attention={
            LAYER: Attention(
                draw(HEADS, LENGTH, size),
                draw(HEADS, LENGTH, size),
                draw(HEADS, LENGTH, size),
                scaling=0.37,
                bias=draw(HEADS, LENGTH, LENGTH) if bias else None,
            )
        },
        logits=draw(LABELS),
        final=draw(LENGTH, WIDTH),
    )


# Each reference gives the rows that count, {(example, …): vector}, with plain Python numbers.


def ref_hidden(seen, layer, heads):
    return {(b, i): seen.hidden[layer][b, i].tolist() for b, size in enumerate(SIZES) for i in range(size)}


def ref_cls(seen, layer, heads):
    return {(b,): seen.hidden[layer][b, 0].tolist() for b in range(len(SIZES))}


def ref_mean(seen, layer, heads):
    rows = ref_hidden(seen, layer, heads)
    return {
        (b,): [sum(rows[b, i][d] for i in range(size)) / size for d in range(WIDTH)] for b, size in enumerate(SIZES)
    }


def ref_classifier_input(seen, layer, heads):
    return {(b,): seen.final[b, 0].tolist() for b in range(len(SIZES))}


def ref_final(seen, layer, heads):
    return {(b, i): seen.final[b, i].tolist() for b, size in enumerate(SIZES) for i in range(size)}


def ref_logits(seen, layer, heads):
    return {(b,): seen.logits[b].tolist() for b in range(len(SIZES))}


def cut(states, example, heads):
    """(H, positions, d) -> [head][position] -> list: a token's heads joined, then cut anew."""
    states = states[example].tolist()
    joined = [[x for head in states for x in head[i]] for i in range(LENGTH)]
    size = len(joined[0]) // heads
    return [[token[h * size : (h + 1) * size] for token in joined] for h in range(heads)]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def score_table(seen, layer, heads, b):
    at = seen.attention[layer]
    heads = heads or HEADS
    q, k = cut(at.query, b, heads), cut(at.key, b, heads)
    scaling = at.scaling if heads == HEADS else (WIDTH // heads) ** -0.5
    with_bias = at.bias is not None and heads == HEADS
    return [
        [
            [
                dot(q[h][i], k[h][j]) * scaling + (at.bias[b, h, i, j].item() if with_bias else 0.0)
                for j in range(SIZES[b])
            ]
            for i in range(SIZES[b])
        ]
        for h in range(heads)
    ]


def softmax(numbers):
    weights = [math.exp(x - max(numbers)) for x in numbers]
    return [w / sum(weights) for w in weights]


def padded(numbers):
    return numbers + [0.0] * (LENGTH - len(numbers))


def ref_scores(seen, layer, heads):
    return {
        (b, h, i, j): [score]
        for b in range(len(SIZES))
        for h, head in enumerate(score_table(seen, layer, heads, b))
        for i, row in enumerate(head)
        for j, score in enumerate(row)
    }


def ref_attention(seen, layer, heads):
    return {
        (b, h, i): padded(softmax(row))
        for b in range(len(SIZES))
        for h, head in enumerate(score_table(seen, layer, heads, b))
        for i, row in enumerate(head)
    }


def ref_relation(part):
    def reference(seen, layer, heads):
        states = getattr(seen.attention[layer], part)
        rows = {}
        for b, size in enumerate(SIZES):
            for h, tokens in enumerate(cut(states, b, heads or states.shape[1])):
                for i in range(size):
                    scores = [dot(tokens[i], tokens[j]) / math.sqrt(len(tokens[i])) for j in range(size)]
                    rows[b, h, i] = padded(softmax(scores))
        return rows

    return reference


REFERENCES = {
    "hidden": ref_hidden,
    "cls": ref_cls,
    "mean": ref_mean,
    "embeddings": ref_hidden,
    "final": ref_final,
    "classifier_input": ref_classifier_input,
    "logits": ref_logits,
    "scores": ref_scores,
    "attention": ref_attention,
    "value_relation": ref_relation("value"),
    "query_relation": ref_relation("query"),
    "key_relation": ref_relation("key"),
}
OF_HEADS = ("scores", "attention", "value_relation", "query_relation", "key_relation")
MAPS = OF_HEADS[1:]


def layer_of(name):
    fixed = FEATURES[name].fixed
    return LAYER if fixed is None else fixed


def test_every_feature_has_a_reference():
    assert set(REFERENCES) == set(FEATURES)
    assert {name for name, f in FEATURES.items() if f.site == "attention"} == set(OF_HEADS)


def agree(rows: Rows, expected):
    assert rows.mask.dtype == torch.bool
    assert rows.values.shape[:-1] == rows.mask.shape
    assert {tuple(index) for index in rows.mask.nonzero().tolist()} == set(expected)
    for index, vector in expected.items():
        assert rows.values[index].tolist() == pytest.approx(vector, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_is_its_loop(name):
    seen, layer = seen_of(), layer_of(name)
    agree(FEATURES[name](seen, layer), REFERENCES[name](seen, layer, None))


@pytest.mark.parametrize("name", OF_HEADS)
@pytest.mark.parametrize("heads", [1, 2, 4, 6, 12])
def test_heads_are_joined_token_by_token_before_they_are_cut_anew(name, heads):
    seen = seen_of()
    agree(FEATURES[name](seen, LAYER, heads=heads), REFERENCES[name](seen, LAYER, heads))


@pytest.mark.parametrize("name", ["query_relation", "key_relation", "value_relation"])
def test_relations_in_heads_of_a_size(name):
    seen = seen_of()
    agree(FEATURES[name](seen, LAYER, size=2), REFERENCES[name](seen, LAYER, WIDTH // 2))


@pytest.mark.parametrize("window", [LENGTH, 2])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_causal_windows_and_bent_scores(window, softcap):
    seen = seen_of(bias=False)
    place = torch.arange(LENGTH)
    sees = (place[:, None] >= place) & (place[:, None] - place < window) & seen.mask[:, None, None, :]
    seen.attention[LAYER].mask, seen.attention[LAYER].softcap = sees, softcap
    scores, maps = {}, {}
    for b, size in enumerate(SIZES):
        for h, head in enumerate(score_table(seen, LAYER, None, b)):
            for i in range(size):
                keys = range(max(0, i - window + 1), i + 1)
                bent = [softcap * math.tanh(head[i][j] / softcap) if softcap else head[i][j] for j in keys]
                scores |= {(b, h, i, j): [score] for j, score in zip(keys, bent)}
                maps[b, h, i] = padded([0.0] * keys[0] + softmax(bent))
    agree(FEATURES["scores"](seen, LAYER), scores)
    agree(FEATURES["attention"](seen, LAYER), maps)
    agree(FEATURES["value_relation"](seen, LAYER), REFERENCES["value_relation"](seen, LAYER, None))  # between all


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_what_the_classifier_reads(pooling):
    seen = replace(seen_of(), pooling=pooling)
    places = {b: range(size) if pooling == "mean" else [size - 1] for b, size in enumerate(SIZES)}
    read = {(b,): [seen.final[b, list(at), d].mean().item() for d in range(WIDTH)] for b, at in places.items()}
    agree(FEATURES["classifier_input"](seen, LOGITS), read)
    at = {b: size - 1 if pooling == "last" else 0 for b, size in enumerate(SIZES)}  # the mean is no token
    agree(FEATURES["cls"](seen, LAYER), {(b,): seen.hidden[LAYER][b, i].tolist() for b, i in at.items()})


def test_one_head_of_all_is_the_whole_product():
    at = seen_of(bias=False).attention[LAYER]
    joined_q, joined_k = (x[0].transpose(0, 1).flatten(1) for x in (at.query, at.key))
    rows = FEATURES["scores"](seen_of(bias=False), LAYER, heads=1)
    torch.testing.assert_close(rows.values[0, 0, :, :, 0], joined_q @ joined_k.T / math.sqrt(WIDTH))


@pytest.mark.parametrize("name", MAPS)
def test_maps_give_masked_keys_nothing_and_sum_to_one(name):
    for dtype in (torch.float32, torch.float64):
        rows = FEATURES[name](seen_of(dtype=dtype), LAYER)
        for b, size in enumerate(SIZES):
            assert (rows.values[b, :, :, size:] == 0).all()
        torch.testing.assert_close(rows.values.sum(-1), torch.ones(rows.mask.shape, dtype=dtype))


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("noise", [1.0, 1e4, -1e30])
def test_what_stands_in_padding_never_matters(name, noise):
    seen, layer = seen_of(), layer_of(name)
    before = FEATURES[name](seen, layer)
    filled = replace(
        seen,
        hidden={k: with_padding(v, seen.mask, noise) for k, v in seen.hidden.items()},
        final=with_padding(seen.final, seen.mask, noise),
        attention={
            k: replace(
                at,
                **{
                    part: with_padding(getattr(at, part).transpose(1, 2), seen.mask, noise).transpose(1, 2)
                    for part in ("query", "key", "value")
                },
            )
            for k, at in seen.attention.items()
        },
    )
    after = FEATURES[name](filled, layer)
    assert torch.equal(before.mask, after.mask)
    torch.testing.assert_close(before.values[before.mask], after.values[after.mask], rtol=1e-12, atol=1e-12)
    assert after.values[after.mask].isfinite().all()


def with_padding(states, mask, noise):
    states = states.clone()
    states[~mask] = noise * torch.linspace(0.5, 1.5, states[~mask].numel(), dtype=states.dtype).reshape(
        states[~mask].shape
    )
    return states


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize(
    ("dtype", "compared"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float32)],
)
def test_half_precision_is_compared_in_full(name, dtype, compared):
    seen = seen_of(dtype=dtype)
    rows = FEATURES[name](seen, layer_of(name))
    assert rows.values.dtype == compared
    full = replace(
        seen,
        hidden={k: v.float() for k, v in seen.hidden.items()},
        attention={
            k: Attention(at.query.float(), at.key.float(), at.value.float(), at.scaling, at.bias.float())
            for k, at in seen.attention.items()
        },
        logits=seen.logits.float(),
        final=seen.final.float(),
    )
    torch.testing.assert_close(rows.values, FEATURES[name](full, layer_of(name)).values)


@pytest.mark.parametrize("name", FEATURES)
def test_double_precision_stays(name):
    assert FEATURES[name](seen_of(), layer_of(name)).values.dtype == torch.float64


@pytest.mark.parametrize("name", FEATURES)
def test_gradients_reach_what_was_seen(name):
    seen, layer = seen_of(), layer_of(name)
    tensors = [*seen.hidden.values(), seen.logits, seen.final]
    tensors += [getattr(seen.attention[LAYER], part) for part in ("query", "key", "value")]
    for tensor in tensors:
        tensor.requires_grad_()
    rows = FEATURES[name](seen, layer)
    (rows.values.square() * rows.mask.unsqueeze(-1)).sum().backward()
    reached = [tensor.grad for tensor in tensors if tensor.grad is not None]
    assert reached
    assert all(gradient.isfinite().all() and gradient.abs().sum() > 0 for gradient in reached)


def test_logits_cannot_be_read_from_a_forward_that_stopped():
    with pytest.raises(RuntimeError, match="stopped before"):
        FEATURES["logits"](replace(seen_of(), logits=None), LOGITS)


def test_the_classifier_reads_what_the_projector_makes():
    projector = torch.nn.Linear(WIDTH, 5, dtype=torch.float64)
    seen = replace(seen_of(), projector=projector)
    states = ref_classifier_input(seen, LAYER, None)
    weight, bias = projector.weight.tolist(), projector.bias.tolist()
    agree(
        FEATURES["classifier_input"](seen, LOGITS),
        {b: [dot(row, state) + c for row, c in zip(weight, bias)] for b, state in states.items()},
    )


def test_a_projector_in_half_precision_computes_in_full():
    """A student may run on bf16 copies of its weights."""
    projector = torch.nn.Linear(WIDTH, 5, dtype=torch.bfloat16)
    seen = replace(seen_of(dtype=torch.bfloat16), projector=projector)
    rows = FEATURES["classifier_input"](seen, LOGITS)
    assert rows.values.dtype == torch.float32
    torch.testing.assert_close(rows.values, projector.float()(seen.final[:, 0].float()))


def test_where_features_look():
    assert {name: (f.site, f.fixed, f.width) for name, f in FEATURES.items()} == {
        "hidden": ("hidden", None, "width"),
        "cls": ("hidden", None, "width"),
        "mean": ("hidden", None, "width"),
        "embeddings": ("hidden", 0, "width"),
        "final": ("final", LOGITS, "width"),
        "classifier_input": ("final", LOGITS, "reads"),
        "logits": ("logits", LOGITS, "labels"),
        "scores": ("attention", None, None),
        "attention": ("attention", None, None),
        "value_relation": ("attention", None, None),
        "query_relation": ("attention", None, None),
        "key_relation": ("attention", None, None),
    }


def test_a_reader_without_gradients_takes_none_from_the_next():
    states = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    rows = Rows(states, torch.ones(2, dtype=torch.bool))
    with torch.no_grad():
        assert not (2 * rows.values).requires_grad
    rows.values.sum().backward()
    assert states.grad is not None
    assert not Rows(states.detach(), rows.mask).values.requires_grad
