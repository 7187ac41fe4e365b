"""What a tap hands out is what the model itself computed; and the model is left as it was."""

import copy

import pytest
import torch
from transformers.models.deberta_v2 import modeling_deberta_v2

from limbeck import architectures, taps
from limbeck.architectures import FAMILIES, blocks, dense_map, inputs, shape
from limbeck.errors import LimbeckError
from limbeck.features import LOGITS, Seen
from limbeck.taps import Tap
from limbeck.views import shortened
from tests.tiny import causal, columns_for, every_family, pre_norm, tiny_batch, tiny_model

LAYERS = 4
families = pytest.mark.parametrize("family", every_family)


@pytest.fixture(scope="module")
def models():
    """Built once a module; nothing here may change them, which is what half of the tests look for."""
    return {family: tiny_model(family, LAYERS) for family in every_family}


def own_answers(model, batch, **options):
    """What the model says of itself: hidden states and eager attention maps."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    return eager(**columns_for(model, batch), output_hidden_states=True, output_attentions=True, **options)


def own_states(model, own, batch):
    """Its states, the last before the final norm, which transformers lists after it."""
    if model.config.model_type not in pre_norm:
        return own.hidden_states
    last, caught = blocks(model)[-1], []
    handle = last.register_forward_hook(lambda _, __, output: caught.append(output))
    model(**columns_for(model, batch))
    handle.remove()
    return (*own.hidden_states[:-1], *caught)


def rows_agree(rows, expected, close=1e-5):
    torch.testing.assert_close(rows.values[rows.mask], expected[rows.mask], rtol=close, atol=close)


@families
@torch.no_grad()
def test_hidden_states_are_the_models_own(models, family):
    model, batch = models[family], tiny_batch(models[family])
    own = own_answers(model, batch)
    states = own_states(model, own, batch)
    assert len(states) == LAYERS + 1
    sites = [("embeddings", 0), ("final", LOGITS), ("logits", LOGITS)]
    found = Tap(model, [("hidden", k) for k in range(LAYERS + 1)] + sites)(**batch)
    for layer, expected in enumerate(states):
        rows = found["hidden", layer]
        assert torch.equal(rows.mask, batch["attention_mask"].bool())
        rows_agree(rows, expected)
    rows_agree(found["embeddings", 0], states[0])
    rows_agree(found["final", LOGITS], own.hidden_states[LAYERS])
    rows_agree(found["logits", LOGITS], own.logits)
    differ = [(states[k] - states[k + 1]).abs().max() for k in range(LAYERS)]
    assert min(differ) > 0.1  # otherwise this test could not tell one layer from the next


@families
@torch.no_grad()
def test_attention_is_the_models_own(models, family):
    model, batch = models[family], tiny_batch(models[family])
    own = own_answers(model, batch)
    every_layer = range(1, LAYERS + 1)
    found = Tap(model, [(name, k) for k in every_layer for name in ("attention", "scores")])(**batch)
    for layer in every_layer:
        expected = own.attentions[layer - 1]
        assert (expected[:, 0] - expected[:, 1]).abs().max() > 0.05
        rows_agree(found["attention", layer], expected)
        scores = found["scores", layer]
        for b, size in enumerate(batch["attention_mask"].sum(1).tolist()):
            own_maps, kept = expected[b, :, :size, :size], scores.mask[b, :, :size, :size]
            maps = scores.values[b, :, :size, :size, 0].masked_fill(~kept, -torch.inf).softmax(-1)
            torch.testing.assert_close(maps, own_maps, rtol=1e-5, atol=1e-5)
            assert torch.equal(kept, own_maps > 0)  # a key that is not seen is no row, and has no weight
            assert torch.equal(found["attention", layer].values[b, :, :size, :size] > 0, own_maps > 0)
            assert scores.mask[b].sum() == kept.sum()


@pytest.mark.parametrize("family", causal)
@torch.no_grad()
def test_a_causal_model_is_read_at_its_last_token(models, family):
    """There `cls` is the token the classifier reads, whatever stands behind it; no token sees a later one."""
    model, batch = models[family], tiny_batch(models[family])
    sites = [("cls", 2), ("hidden", 2), ("classifier_input", LOGITS), ("final", LOGITS), ("attention", 1)]
    found = Tap(model, sites)(**batch)
    for b, size in enumerate(batch["attention_mask"].sum(1).tolist()):
        assert torch.equal(found["cls", 2].values[b], found["hidden", 2].values[b, size - 1])
        assert torch.equal(found["classifier_input", LOGITS].values[b], found["final", LOGITS].values[b, size - 1])
    logits = model.score(found["classifier_input", LOGITS].values)
    torch.testing.assert_close(logits, model(**columns_for(model, batch)).logits, rtol=1e-5, atol=1e-5)
    assert found["attention", 1].values.triu(1).abs().max() == 0


@pytest.mark.parametrize(("pooling", "feature"), [("cls", "cls"), ("mean", "mean")])
@torch.no_grad()
def test_what_modernberts_classifier_reads(pooling, feature):
    model = tiny_model("modernbert", LAYERS, classifier_pooling=pooling)
    batch = tiny_batch(model)
    found = Tap(model, [("classifier_input", LOGITS), ("cls", 1), ("hidden", 1)])(**batch)
    logits = model.classifier(model.head(found["classifier_input", LOGITS].values))
    torch.testing.assert_close(logits, model(**columns_for(model, batch)).logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(found["cls", 1].values, found["hidden", 1].values[:, 0])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
@torch.no_grad()
def test_shared_keys_and_values_are_repeated(models, family):
    """Four heads share two keys and values, or one: each head is as if it had its own."""
    model, batch = models[family], tiny_batch(models[family], sizes=(6,))
    attention, caught = architectures.attention(model, 2), []
    handle = attention.v_proj.register_forward_hook(lambda _, __, output: caught.append(output))
    relation = Tap(model, [("value_relation", 2)])(**batch)["value_relation", 2]
    handle.remove()
    own = caught[0].unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    for head in range(4):
        value = own[:, head * own.shape[1] // 4]
        expected = (value @ value.transpose(-1, -2) / attention.head_dim**0.5).softmax(-1)
        torch.testing.assert_close(relation.values[:, head], expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_mpnets_scores_hold_its_relative_positions(models):
    model, batch = models["mpnet"], tiny_batch(models["mpnet"])
    without = copy.deepcopy(model)
    without.mpnet.encoder.relative_attention_bias.weight.zero_()
    one, other = (Tap(m, [("scores", 1)])(**batch)["scores", 1] for m in (model, without))
    bias = model.mpnet.encoder.compute_position_bias(torch.zeros(3, batch["input_ids"].shape[1], 32))
    expected = bias.unsqueeze(-1).expand_as(one.values)[one.mask]
    torch.testing.assert_close((one.values - other.values)[one.mask], expected, rtol=1e-4, atol=1e-4)
    assert expected.abs().max() > 0.1


DEBERTA_FORMS = [
    {},
    {"pos_att_type": ["c2p"]},
    {"pos_att_type": ["p2c"], "position_buckets": -1},
    {"pos_att_type": ["p2c", "c2p"], "share_att_key": False},
    {"pos_att_type": "c2p|p2c", "share_att_key": False, "norm_rel_ebd": "none", "max_relative_positions": 6},
    {"pos_att_type": [], "share_att_key": False},
    {"relative_attention": False, "position_biased_input": True},
    {"position_biased_input": True, "conv_kernel_size": 3, "conv_act": "gelu"},
    {"position_biased_input": True, "type_vocab_size": 2, "embedding_size": 16},
]


@pytest.mark.parametrize("form", DEBERTA_FORMS, ids=str)
def test_debertas_forms(form, monkeypatch):
    """States and scores are what the model works on, positions and convolution included, however far it runs."""
    model = tiny_model("deberta-v2", LAYERS, **form)
    batch = tiny_batch(model)
    columns = {name: batch[name] for name in inputs(model)}
    before_softmax = []
    real = torch.nn.functional.softmax

    def watched(scores, dim):
        before_softmax.append(scores)
        return real(scores, dim)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "softmax", watched)
        own = model(**columns, output_hidden_states=True, output_attentions=True)
    assert len(before_softmax) == LAYERS
    for deepest in (1, 2, LAYERS):
        every_layer = range(1, deepest + 1)
        features = ("hidden", "scores", "attention")
        found = Tap(model, [(name, k) for k in every_layer for name in features])(**batch)
        for k in every_layer:
            rows_agree(found["hidden", k], own.hidden_states[k])
            rows_agree(found["attention", k], own.attentions[k - 1])
            rows_agree(found["scores", k], before_softmax[k - 1].unsqueeze(-1))
    found["scores", 1].values.sum().backward()
    projected = [p for n, p in model.named_parameters() if "pos_key_proj" in n or "rel_embeddings" in n]
    if form.get("pos_att_type", True) and form.get("relative_attention", True):
        assert projected
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in projected)


@torch.no_grad()
def test_mpnets_relative_positions_are_made_once_a_length(models, monkeypatch):
    """Some versions of transformers make them on the host and copy them, which a captured step cannot do."""
    encoder, made = models["mpnet"].mpnet.encoder, []
    real = encoder.relative_position_bucket

    def watched(places, **options):
        made.append(places.shape[1])
        return real(places, **options)

    tap = Tap(models["mpnet"], [("cls", 2)])
    monkeypatch.setattr(type(encoder), "relative_position_bucket", staticmethod(watched))
    for length in (9, 12, 9, 12):
        tap(**tiny_batch(models["mpnet"], length=length))
    assert made == [9, 12]


@pytest.mark.parametrize("sites", [[("cls", 2)], [("logits", LOGITS)]])
@torch.no_grad()
def test_debertas_relative_positions_are_made_once_a_length(models, sites, monkeypatch):
    """They are copied from the host, which a captured step cannot do: all a step's first turn made is there."""
    made, real = [], modeling_deberta_v2.build_relative_position

    def watched(states, *more, **options):
        made.append(states.shape[1])
        return real(states, *more, **options)

    monkeypatch.setattr(modeling_deberta_v2, "build_relative_position", watched)
    model = models["deberta-v2"]
    tap = Tap(model, sites)
    for sizes in [(9, 5), (7,), (9,), (4, 7), (7, 7, 7)]:
        batch = tiny_batch(model, sizes=sizes)
        rows = tap(**batch)[sites[0]]
        torch.testing.assert_close(rows.values, Tap(model, sites)(**batch)[sites[0]].values)
        made.pop()  # by the second tap
    assert made == [9, 7]


@torch.no_grad()
def test_in_other_heads_positions_do_not_count(models):
    """Relations can be cut anew; a position bias belongs to the heads it was learnt for."""
    model, batch = models["deberta-v2"], tiny_batch(models["deberta-v2"], sizes=(6,))
    sites = [("scores(heads=2)", 1), ("value_relation(heads=2)", 1), ("embeddings", 0)]
    found = Tap(model, sites)(**batch)
    state = found["embeddings", 0].values
    q, k, v = (linear(state).unflatten(-1, (2, 16)).transpose(1, 2) for linear in projections(model, 1))
    rows_agree(found["scores(heads=2)", 1], (q @ k.transpose(-1, -2) / 4).unsqueeze(-1))
    rows_agree(found["value_relation(heads=2)", 1], (v @ v.transpose(-1, -2) / 4).softmax(-1))


@pytest.mark.parametrize("family", [family for family in every_family if family not in pre_norm])
@torch.no_grad()
def test_relations_come_from_the_layers_own_projections(models, family):
    """Values, queries and keys are not mistaken for each other."""
    model, batch = models[family], tiny_batch(models[family], sizes=(6,))
    layer, (q, k, v) = 2, projections(model, 2)
    state = own_answers(model, batch).hidden_states[layer - 1]
    found = Tap(model, [(f"{part}_relation", layer) for part in ("query", "key", "value")])(**batch)
    for part, linear in [("query", q), ("key", k), ("value", v)]:
        heads = linear(state).unflatten(-1, (4, 8)).transpose(1, 2)
        expected = (heads @ heads.transpose(-1, -2) / 8**0.5).softmax(-1)
        rows_agree(found[f"{part}_relation", layer], expected)


DEBERTAS = ("query_proj", "key_proj", "value_proj")


def projections(model, layer):
    attention = architectures.attention(model, layer)
    for names in [("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("q", "k", "v"), DEBERTAS]:
        if hasattr(attention, names[0]):
            return [getattr(attention, name) for name in names]
    raise AssertionError("unknown projections")


class Counter:
    """Which blocks ran."""

    def __init__(self, model):
        self.ran = []
        layers = {}
        for k, block in enumerate(blocks(model), 1):
            layers.setdefault(block, []).append(k)  # a shared block stands for all of them, in turn
        self.handles = [
            block.register_forward_hook(lambda *_, layers=found: self.ran.append(layers.pop(0)))
            for block, found in layers.items()
        ]

    def __enter__(self):
        return self.ran

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()


@families
@pytest.mark.parametrize(
    ("sites", "deepest"),
    [
        ([("hidden", 0)], 1),
        ([("cls", 2)], 2),
        ([("attention", 3), ("mean", 1)], 3),
        ([("hidden", 4)], 4),
        ([("cls", 1), ("logits", LOGITS)], 4),
    ],
)
@torch.no_grad()
def test_a_forward_goes_no_deeper_than_the_deepest_site(models, family, sites, deepest):
    model = models[family]
    tap = Tap(model, sites)
    with Counter(model) as ran:
        found = tap(**tiny_batch(model))
    assert ran == list(range(1, deepest + 1))
    assert set(found) == set(sites)


@families
@torch.no_grad()
def test_the_head_runs_only_if_logits_are_read(models, family):
    model, ran = models[family], []
    handles = [m.register_forward_hook(lambda *_: ran.append(1)) for m in architectures.head(model).values()]
    try:
        Tap(model, [("cls", LAYERS)])(**tiny_batch(model))
        assert not ran
        Tap(model, [("logits", LOGITS)])(**tiny_batch(model))
        assert ran
    finally:
        for handle in handles:
            handle.remove()


@families
@torch.no_grad()
def test_only_the_sites_read_are_kept(models, family, monkeypatch):
    kept = []

    def recorded(**options):
        kept.append(Seen(**options))
        return kept[-1]

    monkeypatch.setattr(taps, "Seen", recorded)
    model = models[family]
    Tap(model, [("cls", 1), ("hidden", 3), ("scores", 2), ("logits", LOGITS)])(**tiny_batch(model))
    Tap(model, [("mean", 2)])(**tiny_batch(model))
    Tap(model, [("value_relation", 1), ("embeddings", 0)])(**tiny_batch(model))
    assert [(set(seen.hidden), set(seen.attention)) for seen in kept] == [({1, 3}, {2}), ({2}, set()), ({0}, {1})]
    assert [seen.logits is not None for seen in kept] == [True, False, False]


def traces(model):
    """Everything a tap might leave behind."""
    hooks = sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks_with_kwargs) for m in model.modules()
    )
    return {
        "hooks": hooks,
        "attention": model.config._attn_implementation,
        "watched": taps._watched.get(),
        "blocks": [id(block) for block in blocks(model)],
        "modules": [(name, id(module), module.training) for name, module in model.named_modules()],
        "parameters": [(name, id(p), p.requires_grad) for name, p in model.named_parameters()],
        "attributes": [(name, sorted(vars(module))) for name, module in model.named_modules()],
    }


EVERY_SITE = [("hidden", 0), ("hidden", 2), ("scores", 1), ("attention", 3)]


@families
@pytest.mark.parametrize("more", [[], [("logits", LOGITS)]])
@torch.no_grad()
def test_the_model_is_untouched_after_a_call(models, family, more):
    model, batch = models[family], tiny_batch(models[family])
    before, logits = traces(model), model(**columns_for(model, batch)).logits
    assert before["hooks"] == 0
    assert before["attention"] == tiny_model(family, 1).config._attn_implementation  # as built, whatever ran before
    tap = Tap(model, EVERY_SITE + more)
    tap(**batch)
    tap(**batch)
    assert traces(model) == before
    assert torch.equal(model(**columns_for(model, batch)).logits, logits)


@families
@pytest.mark.parametrize("where", [1, 3])
@torch.no_grad()
def test_the_model_is_untouched_after_an_error_inside_it(models, family, where):
    model, batch = models[family], tiny_batch(models[family])
    before = traces(model)

    def fail(*_):
        raise ZeroDivisionError("inside the forward")

    handle = blocks(model)[where - 1].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError, match="inside the forward"):
        Tap(model, EVERY_SITE)(**batch)
    handle.remove()
    assert traces(model) == before
    found = Tap(model, EVERY_SITE)(**batch)  # and works again
    rows_agree(found["hidden", 2], own_answers(model, batch).hidden_states[2])


@families
@pytest.mark.parametrize("more", [[], [("logits", LOGITS)]])
@pytest.mark.parametrize("attention", [[], [("attention", 2)]])
def test_a_student_in_training_is_tapped_in_its_own_forward(models, family, more, attention):
    """With dropout on, the tapped values are those of a forward that drew the same numbers."""
    model = copy.deepcopy(models[family]).train()
    batch = tiny_batch(model)
    torch.manual_seed(3)
    own = model(**columns_for(model, batch), output_hidden_states=True)
    torch.manual_seed(3)
    sites = [("hidden", k) for k in range(LAYERS + 1)] + [("final", LOGITS)]
    found = Tap(model, sites + attention + more)(**batch)
    for layer, expected in enumerate(own.hidden_states[:-1]):
        rows_agree(found["hidden", layer], expected, 1e-6)
    rows_agree(found["final", LOGITS], own.hidden_states[-1], 1e-6)
    if more:
        rows_agree(found["logits", LOGITS], own.logits, 1e-6)
    torch.manual_seed(4)
    other = Tap(model, [("hidden", LAYERS)])(**batch)["hidden", LAYERS]
    assert (other.values - found["hidden", LAYERS].values).abs().max() > 0.01  # dropout was on


@families
def test_training_mode_reaches_a_tap_made_before(models, family):
    """The tap of a stage is made once, and the model is switched between training and evaluation all the time."""
    model = copy.deepcopy(models[family]).eval()
    batch, tap = tiny_batch(model), Tap(model, [("cls", LAYERS)])
    quiet = tap(**batch)["cls", LAYERS].values
    model.train()
    torch.manual_seed(0)
    assert (tap(**batch)["cls", LAYERS].values - quiet).abs().max() > 0.01
    model.eval()
    assert torch.equal(tap(**batch)["cls", LAYERS].values, quiet)


@families
def test_a_tap_follows_the_weights_of_the_model(models, family):
    model = copy.deepcopy(models[family])
    batch, tap = tiny_batch(model), Tap(model, [("cls", 2)])
    before = tap(**batch)["cls", 2].values
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    after = tap(**batch)["cls", 2].values
    assert (after - before).abs().max() > 0.01
    assert torch.equal(after, Tap(model, [("cls", 2)])(**batch)["cls", 2].values)
    tap(**batch)["cls", 2].values.sum().backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    table = next(name for name, p in model.named_parameters() if p is model.get_input_embeddings().weight)
    assert table in reached
    assert not any(name.startswith(tuple(architectures.head(model))) for name in reached)


@families
def test_the_columns_a_model_takes(models, family):
    model = models[family]
    columns = inputs(model)
    assert columns == tuple(columns_for(model, tiny_batch(model)))
    assert ("token_type_ids" in columns) == (family in ("bert", "electra", "albert"))


@families
@torch.no_grad()
def test_token_types_reach_the_models_that_have_them_and_no_other(models, family):
    model, batch = models[family], tiny_batch(models[family])
    assert batch["token_type_ids"].max() == 1
    sites = [("logits", LOGITS)]
    found = Tap(model, sites)(**batch)["logits", LOGITS].values  # RoBERTa would index out of its one type
    plain = Tap(model, sites)(**(batch | {"token_type_ids": torch.zeros_like(batch["token_type_ids"])}))
    same = torch.equal(found, plain["logits", LOGITS].values)
    assert same == (family not in ("bert", "electra", "albert"))


@families
@torch.no_grad()
def test_columns_of_the_training_loop_do_not_reach_the_model(models, family):
    model, batch = models[family], tiny_batch(models[family])
    extra = {"weight": torch.ones(3), "id": torch.arange(3), "count": torch.tensor(3.0)}
    found = Tap(model, [("cls", 1)])(**batch, **extra)
    assert torch.equal(found["cls", 1].values, Tap(model, [("cls", 1)])(**batch)["cls", 1].values)


@families
def test_a_shortened_model_shares_every_weight(models, family):
    model = models[family]
    view = shortened(model, 2)
    assert len(blocks(model)) == LAYERS
    ours = {id(p) for p in model.base_model.parameters()}
    assert {id(p) for p in view.parameters()} < ours
    base_blocks = view.get_submodule(FAMILIES[family].blocks)
    assert [id(b) for b in base_blocks] == [id(b) for b in blocks(model)[:2]]


@families
def test_shapes_are_read_off_the_model(family):
    assert shape(tiny_model(family, layers=3, width=24, heads=2, labels=5))[:5] == (3, 24, 2, 5, 24)


def test_an_unknown_family_says_what_to_add():
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model("xlnet", d_model=16, n_layer=1, n_head=2, d_inner=16, vocab_size=20)
    model = AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(LimbeckError, match=r'"xlnet".*Known: albert, bart, bert.*architectures\.py'):
        Tap(model, [("cls", 1)])


def test_a_decoder_laid_out_as_bert_is_not_taken_for_an_encoder():
    from transformers import BertGenerationConfig, BertGenerationDecoder

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertGenerationDecoder(BertGenerationConfig(vocab_size=20, is_decoder=True, **sizes))
    with pytest.raises(LimbeckError, match='"bert-generation" is not one limbeck knows'):
        Tap(model, [("hidden", 1)])


@pytest.mark.parametrize("family", ["olmo2", "phi3", "gpt_neox", "smollm3", "opt"])
@torch.no_grad()
def test_an_unknown_family_laid_out_as_llama_is_found(family):
    model = tiny_model(family, LAYERS, pad_token_id=0, num_key_value_heads=2)
    assert family not in FAMILIES
    batch = tiny_batch(model)
    found = Tap(model, [("hidden", 2), ("attention", 3), ("final", LOGITS), ("logits", LOGITS)])(**batch)
    own = own_answers(model, batch)
    rows_agree(found["hidden", 2], own.hidden_states[2])
    rows_agree(found["attention", 3], own.attentions[2])
    rows_agree(found["final", LOGITS], own.hidden_states[-1])
    rows_agree(found["logits", LOGITS], own.logits)


@pytest.mark.parametrize("family", ["camembert", "ernie", "data2vec-text", "xlm-roberta-xl", "roberta-prelayernorm"])
@torch.no_grad()
def test_an_unknown_family_laid_out_as_bert_is_found(family):
    """Some of them have a norm behind the last block, which the classifier reads and is no layer."""
    model = tiny_model(family, LAYERS, type_vocab_size=1)
    assert family not in FAMILIES
    batch = tiny_batch(model)
    sites = [("hidden", 2), ("attention", 3), ("cls", LAYERS), ("classifier_input", LOGITS), ("logits", LOGITS)]
    found = Tap(model, sites)(**batch)
    own = own_answers(model, batch)
    rows_agree(found["hidden", 2], own.hidden_states[2])
    rows_agree(found["attention", 3], own.attentions[2])
    rows_agree(found["logits", LOGITS], own.logits)
    seen = []
    handle = dense_map(model).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(**{name: batch[name] for name in ("input_ids", "attention_mask")})
    handle.remove()
    torch.testing.assert_close(found["classifier_input", LOGITS].values, seen[0])


def test_two_models_are_tapped_one_inside_the_other():
    """The student's forward may start while the teacher's tap is open, as long as each knows its own layers."""
    outer, inner = tiny_model("bert", seed=0), tiny_model("roberta", seed=1)
    batches = tiny_batch(outer), tiny_batch(inner)
    expected = [Tap(m, [("attention", 2)])(**b)["attention", 2].values for m, b in zip((outer, inner), batches)]
    found = []
    handle = blocks(outer)[0].register_forward_pre_hook(
        lambda *_: found.append(Tap(inner, [("attention", 2)])(**batches[1])["attention", 2].values)
    )
    found.insert(0, Tap(outer, [("attention", 2)])(**batches[0])["attention", 2].values)
    handle.remove()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("site", [("hidden", 2), ("attention", 2)])
def test_a_mask_is_built_even_where_it_hides_nothing(site, monkeypatch):
    """Whether it hides anything would have to be asked of the device, which a captured step cannot."""
    model, masks = tiny_model("bert"), []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watch(*args, attn_mask=None, **options):
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    batch = tiny_batch(model, (5, 5))
    Tap(model, [site])(**batch)
    assert masks
    assert all(mask is not None for mask in masks)
    assert model.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_padding_that_sees_nothing_is_finite_under_a_cap():
    """A row behind the window of a text attends to no token; in fp64 its mask must survive a softmax in fp32."""
    model = tiny_model("gemma2").double()
    found = Tap(model, [("hidden", 4)])(**tiny_batch(model, (9, 3), length=12))
    assert found["hidden", 4].values.isfinite().all()


@families
@torch.no_grad()
def test_padding_is_hidden_in_half_precision(family):
    """Whatever word stands where there is none, the states of the others are the same to the last bit."""
    model = tiny_model(family, LAYERS).bfloat16()
    batch = tiny_batch(model, (9, 4))
    empty = batch["attention_mask"] == 0
    other = {**batch, "input_ids": batch["input_ids"].masked_fill(empty, 7)}
    one, two = (Tap(model, [("hidden", LAYERS)])(**given)["hidden", LAYERS] for given in (batch, other))
    # DeBERTa empties what is padding before its first block.
    assert torch.equal(one.values[empty], two.values[empty]) == (family == "deberta-v2")
    assert torch.equal(one.values[one.mask], two.values[two.mask])


@torch.no_grad()
def test_a_mask_in_half_precision_is_made_once(monkeypatch):
    model, masks = tiny_model("bert", LAYERS).bfloat16(), []
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, attn_mask, **options: masks.append(attn_mask) or attend(*args, attn_mask=attn_mask, **options),
    )
    Tap(model, [("hidden", LAYERS)])(**tiny_batch(model))
    assert len(masks) == LAYERS
    assert {(mask.data_ptr(), mask.dtype) for mask in masks} == {(masks[0].data_ptr(), torch.bfloat16)}
