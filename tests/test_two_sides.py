"""Models with an encoder and a decoder: what is read of either, and of the attention between them; students of them."""

import copy

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from limbeck.adaptation import sided
from limbeck.architectures import blocks, shape
from limbeck.distiller import Distiller
from limbeck.errors import LimbeckError
from limbeck.features import LOGITS, find_feature
from limbeck.initialisers import start_student
from limbeck.models import stop_layer_drop
from limbeck.objectives import Labels, Logits, Match, Replacement
from limbeck.recipe import resolve
from limbeck.taps import Tap
from tests import toy
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
    wide = shape(tiny_pair("t5", d_kv=12))
    assert (wide.width, wide.attends, wide.at("encoder").attends) == (32, 48, 48)


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


TERMS = {
    "labels": Labels(),
    "logits": Logits("kl(temperature=2)"),
    "decoder": Match("hidden", map="last"),
    "encoder": Match("hidden(side=encoder)", map="uniform", reduce="mean_layers"),
    "cross": Match("attention(side=cross)", map="last", distance="kl"),
}


@torch.no_grad()
def by_hand(student, teacher, batch):
    """The same losses with loops over examples and their tokens, from what the models say of themselves."""
    ours, theirs = own_answers(student, batch), own_answers(teacher, batch)
    losses = {name: [] for name in TERMS}
    sizes = zip(batch["attention_mask"].sum(1).tolist(), batch["decoder_attention_mask"].sum(1).tolist(), strict=True)
    for row, (size, target) in enumerate(sizes):
        logs = [own.logits[row, :target].double() for own in (ours, theirs)]
        right = batch["labels"][row, :target]
        losses["labels"].append(-logs[0].log_softmax(-1)[range(target), right].mean())
        p, q = (log / 2 for log in reversed(logs))
        losses["logits"].append((p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1).mean())
        a, b = (own.decoder_hidden_states[-1][row, :target] for own in (ours, theirs))
        losses["decoder"].append((a - b).square().mean())
        pairs = [(own.encoder_hidden_states, layer) for own, layer in ((ours, 1), (theirs, 2))]
        a, b = (states[layer][row, :size] for states, layer in pairs)
        first = (a - b).square().mean()
        a, b = (own.encoder_last_hidden_state[row, :size] for own in (ours, theirs))
        losses["encoder"].append((first + (a - b).square().mean()) / 2)
        p, q = (own.cross_attentions[-1][row, :, :target, :size] for own in (theirs, ours))
        losses["cross"].append((p * (p.log() - q.log())).sum(-1).mean())
    return {name: torch.stack(found).mean() for name, found in losses.items()}


def test_losses_are_those_worked_by_hand():
    teacher, student = tiny_pair("bart", 4, 4), tiny_pair("bart", 2, 3, seed=1)
    batch = tiny_texts()
    found = Distiller(teacher, student, TERMS)(**batch).parts
    for name, expected in by_hand(student, teacher, batch).items():
        torch.testing.assert_close(found[name], expected.to(found[name]), atol=1e-4, rtol=1e-4, msg=name)


@torch.no_grad()
def test_batches_of_transformers_will_do():
    """Its collators make no mask of the targets: there is a token wherever there is a label."""
    distiller, batch = Distiller(tiny_pair("t5"), tiny_pair("t5", seed=1), TERMS), tiny_texts()
    whole = distiller(**batch).parts
    batch.pop("decoder_attention_mask")
    assert distiller(**batch).parts == whole


@families
def test_students_take_layers_of_both_sides(family):
    teacher = tiny_pair(family, 4, 4)
    start = start_student(["layers([2, 4])"], teacher, teacher, depth=2, labels={}, seed=0)
    student = start.student
    for side in ("encoder", "decoder"):
        for ours, taken in zip(blocks(student, side), (2, 4), strict=True):
            theirs = blocks(teacher, side)[taken - 1].state_dict()
            own = {name: weight for name, weight in ours.state_dict().items() if "relative_attention_bias" not in name}
            assert all(torch.equal(weight, theirs[name]) for name, weight in own.items())
    assert torch.equal(student.lm_head.weight, teacher.lm_head.weight)
    positions = [name for name in student.state_dict() if "relative_attention_bias" in name]
    assert len(positions) == (2 if family in ("t5", "mt5") else 0)
    assert all(torch.equal(student.state_dict()[name], teacher.state_dict()[name]) for name in positions)
    assert student.generation_config.to_dict() == teacher.generation_config.to_dict()
    assert not any("left out" in note for note in start.notes)


@families
@torch.no_grad()
def test_a_student_of_all_layers_is_the_teacher(family, tmp_path):
    teacher, batch = tiny_pair(family), tiny_texts()
    student = start_student(["layers(first)"], teacher, teacher, labels={}, seed=1).student.eval()
    torch.testing.assert_close(student(**batch).logits, teacher(**batch).logits)
    student.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(**batch).logits, teacher(**batch).logits)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_decoder_may_have_another_depth(family):
    teacher = tiny_pair(family, 4, 4)
    student = start_student(["layers(uniform)"], teacher, teacher, depth=4, decoder_depth=1, labels={}, seed=0).student
    assert (shape(student).at("encoder").layers, shape(student).layers) == (4, 1)
    narrow = start_student(["random"], teacher, teacher, depth=2, width=16, labels={}, seed=0).student
    assert (shape(narrow).width, shape(narrow).heads, shape(narrow).at("encoder").heads) == (16, 2, 2)
    assert narrow(**tiny_texts()).logits.shape[-1] == 100


@families
@torch.no_grad()
def test_no_logits_are_made_to_be_thrown_away(family):
    """BART's bias is as wide as the vocabulary, and would widen whatever stands in the place of its output map."""
    tap, sizes = Tap(tiny_pair(family), [("logits", LOGITS)]), []
    tap.runs.register_forward_hook(lambda _, __, output: sizes.append(output.logits.numel()))
    batch = tiny_texts()
    tap(**batch)
    assert sizes[0] < batch["labels"].numel() * 100


def test_a_recipe_moves_to_a_side():
    plain = resolve("cr-ild")
    moved, both = sided(plain, "encoder"), sided(plain, "both")
    assert moved.stages[0].objectives["hidden"]["match"] == "hidden(side=encoder)"
    assert set(moved.stages[0].objectives) == set(plain.stages[0].objectives)
    assert both.stages[0].objectives["hidden"] == plain.stages[0].objectives["hidden"]
    assert both.stages[0].objectives["hidden-encoder"] == moved.stages[0].objectives["hidden"]
    assert both.stages[1] == plain.stages[1]
    assert sided(plain, "decoder") == plain
    mover = sided(resolve("emd-ild"), "both").stages[0].objectives
    assert set(mover["layers-encoder"]["earth_mover"]) == {"attention(side=encoder)", "hidden(side=encoder)"}
    with pytest.raises(LimbeckError, match="compares no layers that an encoder has"):
        sided(resolve("kd"), "both")
    with pytest.raises(LimbeckError, match="Allowed: encoder, decoder, both"):
        sided(plain, "cross")


def test_blocks_that_hand_positions_on_do_not_take_turns():
    with pytest.raises(LimbeckError, match="makes the positions of all"):
        Distiller(tiny_pair("t5", 2, 2), tiny_pair("t5", 1, 1), [Replacement()])


def test_classifiers_on_them_are_refused():
    config = tiny_pair("bart").config
    with pytest.raises(LimbeckError, match="add --kind seq2seq"):
        shape(AutoModelForSequenceClassification.from_config(config))


def test_no_layer_is_dropped():
    """LayerDrop would leave some without a state."""
    config = tiny_pair("bart").config
    config.encoder_layerdrop = config.decoder_layerdrop = 0.5
    model = AutoModelForSeq2SeqLM.from_config(config).train()
    with pytest.raises(LimbeckError, match=r"leaves out layers.*encoder_layerdrop=0.0"):
        Distiller(None, model, [Labels()])
    assert len(stop_layer_drop(model)) == 1
    assert stop_layer_drop(model) == []
    tap = Tap(model, [(f"hidden(side={side})", k) for side in ("encoder", "decoder") for k in (1, 2, 3)])
    assert all(len(tap(**tiny_texts())) == 6 for _ in range(5))


def test_a_run_drops_no_layer_and_says_so(tmp_path):
    data = toy.kinds_data("dropped", lambda text: {"source": text, "target": text})
    dropping = {"encoder_layerdrop": 0.9, "decoder_layerdrop": 0.9}
    teacher = toy.teacher("bart", labels=2, auto="AutoModelForSeq2SeqLM", **dropping)
    run = toy.distill("lwd", tmp_path / "run", teacher=teacher, side="both", **data)
    assert "encoder_layerdrop, decoder_layerdrop set to 0" in (run.folder / "log.txt").read_text("utf8")
    assert AutoModelForSeq2SeqLM.from_pretrained(run.student).config.encoder_layerdrop == 0
