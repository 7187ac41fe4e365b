"""Models with an encoder and a decoder: what a tap hands out of either, and of the attention between them."""

import copy

import pytest
import torch

from limbeck.architectures import blocks, shape
from limbeck.errors import LimbeckError
from limbeck.features import LOGITS, find_feature
from limbeck.taps import Tap
from tests.test_taps import rows_agree
from tests.tiny import tiny_batch, tiny_model, tiny_pair, tiny_texts, two_sided

DEPTHS = {"encoder": 3, "decoder": 4, "cross": 4}
families = pytest.mark.parametrize("family", two_sided)


def own_answers(model, batch):
    """What the model says of itself."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    return eager(**batch, output_hidden_states=True, output_attentions=True)


@families
@torch.no_grad()
def test_states_are_the_models_own(family):
    model, batch = tiny_pair(family), tiny_texts()
    own = own_answers(model, batch)
    states = {"encoder": own.encoder_hidden_states, "decoder": own.decoder_hidden_states}
    # The last of them is after the final norm, where there is one.
    sites = [(f"hidden(side={side})", k) for side in states for k in range(DEPTHS[side])]
    found = Tap(model, [*sites, ("final", LOGITS), ("final(side=encoder)", LOGITS), ("logits", LOGITS)])(**batch)
    masks = {"encoder": batch["attention_mask"], "decoder": batch["decoder_attention_mask"]}
    for side, expected in states.items():
        for layer in range(DEPTHS[side]):
            assert torch.equal(found[f"hidden(side={side})", layer].mask, masks[side].bool())
            rows_agree(found[f"hidden(side={side})", layer], expected[layer])
    rows_agree(found["final(side=encoder)", LOGITS], own.encoder_hidden_states[-1])
    rows_agree(found["final", LOGITS], own.decoder_hidden_states[-1])
    made = found["logits", LOGITS].values
    logits = made.states @ made.weight.T + (0 if made.bias is None else made.bias)
    torch.testing.assert_close(logits, own.logits, atol=1e-4, rtol=1e-4)


@families
@torch.no_grad()
def test_attention_is_the_models_own(family):
    model, batch = tiny_pair(family), tiny_texts()
    own = own_answers(model, batch)
    maps = {"encoder": own.encoder_attentions, "decoder": own.decoder_attentions, "cross": own.cross_attentions}
    sites = [(f"attention(side={side})", k) for side in maps for k in range(1, DEPTHS[side] + 1)]
    found = Tap(model, sites)(**batch)
    for side, expected in maps.items():
        assert len(expected) == DEPTHS[side]
        for layer, own_maps in enumerate(expected, 1):
            assert (own_maps[:, 0] - own_maps[:, 1]).abs().max() > 0.01
            rows_agree(found[f"attention(side={side})", layer], own_maps)


@torch.no_grad()
def test_relations_are_among_tokens_of_one_text():
    """Queries of the attention between the two are of the target, keys and values of the source."""
    batch = tiny_texts()
    names = {part: f"{part}_relation(side=cross)" for part in ("query", "key", "value")}
    found = Tap(tiny_pair("bart"), [(name, 2) for name in names.values()])(**batch)
    source, target = (batch[name].bool() for name in ("attention_mask", "decoder_attention_mask"))
    for part, name in names.items():
        rows, mask = found[name, 2], target if part == "query" else source
        assert torch.equal(rows.mask[:, 0], mask)
        assert rows.values.shape[-1] == mask.shape[1]
        assert not rows.values[:, 0][~mask[:, None].expand_as(rows.values[:, 0])].any()


@families
@torch.no_grad()
def test_a_forward_ends_where_nothing_more_is_read(family):
    model, batch = tiny_pair(family), tiny_texts()
    whole = Tap(model, [("hidden(side=encoder)", 2), ("hidden", 2), ("logits", LOGITS)])(**batch)
    ran = []
    both = {"encoder": blocks(model, "encoder"), "decoder": blocks(model)}
    for side, found in both.items():
        for block in found:
            block.register_forward_pre_hook(lambda *_, side=side: ran.append(side))
    for name, expected in {
        "hidden": ["encoder"] * 3 + ["decoder"] * 2,
        "hidden(side=encoder)": ["encoder"] * 2,
    }.items():
        found = Tap(model, [(name, 2)])(**batch)
        torch.testing.assert_close(found[name, 2].values, whole[name, 2].values)
        assert ran == expected
        ran.clear()


@families
@torch.no_grad()
def test_padding_changes_nothing(family):
    model = tiny_pair(family)
    sites = [("mean(side=encoder)", 2), ("cls", 4), ("mean", 2), ("attention(side=cross)", 3)]
    plain, padded = (Tap(model, sites)(**tiny_texts(more=more)) for more in (0, 5))
    for site in sites:
        kept = [found[site].values[found[site].mask] for found in (plain, padded)]
        torch.testing.assert_close(kept[0], kept[1][..., : kept[0].shape[-1]], atol=1e-5, rtol=1e-5)
        assert not kept[1][..., kept[0].shape[-1] :].any()


def test_sizes_are_those_of_either_side():
    sizes = shape(tiny_pair("bart"))
    assert (sizes.layers, sizes.at("encoder").layers, sizes.at("cross").layers) == (4, 3, 4)


def test_sides_that_are_not_there_are_refused():
    with pytest.raises(LimbeckError, match="one stack of layers"):
        Tap(tiny_model(), [("hidden(side=encoder)", 1)])
    with pytest.raises(LimbeckError, match="there is no side"):
        find_feature("hidden(side=left)")
    with pytest.raises(LimbeckError, match="side=cross goes with"):
        find_feature("hidden(side=cross)")
    with pytest.raises(LimbeckError, match="the decoder predicts"):
        find_feature("logits(side=encoder)")


def test_models_with_one_stack_are_read_as_ever():
    model = tiny_model()
    found = Tap(model, [("hidden", 2), ("hidden(side=decoder)", 2)])(**tiny_batch(model))
    assert torch.equal(found["hidden", 2].values, found["hidden(side=decoder)", 2].values)
