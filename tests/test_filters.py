"""Filters on layers: what each kind computes, what is copied, and what they refuse."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForMaskedLM

from limbeck import architectures, views
from limbeck.errors import LimbeckError
from limbeck.filters import DROPOUT, Filters
from limbeck.initialisers import start_student
from limbeck.mappings import pairs, sanh
from limbeck.taps import Tap
from limbeck.vocabulary import whole
from tests.tiny import every_family, tiny_batch, tiny_model, tiny_pair

SANH = sanh(2, 4)  # 1←1, 2←4
KINDS = ("linear", "mlp", "next-layer", "all-next-layers")


def states(model, batch):
    depth = architectures.shape(model).layers
    with torch.no_grad():
        found = Tap(model, [("hidden", k) for k in range(depth + 1)])(**batch)
    return [found["hidden", k].values for k in range(depth + 1)]


def bound(kind="linear", student=None, layers=SANH, **options):
    teacher = tiny_model("bert", 4, seed=1)
    student = student or tiny_model("bert", 2, width=16, heads=2, seed=2)
    filters = Filters(student.config.hidden_size, 32, len(layers.student), kind=kind, **options)
    filters.bind(student, teacher, layers, tokens=True)
    return filters.eval(), student, teacher


def sides(student, teacher, layers=SANH):
    batch = tiny_batch(teacher)
    ours, theirs = states(student, batch), states(teacher, batch)
    return [ours[k] for k in layers.student], [theirs[k] for k in layers.teacher], batch["attention_mask"].bool()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_ends_in_the_teachers_width_and_predicts(kind):
    filters, student, teacher = bound(kind)
    ours, theirs, mask = sides(student, teacher)
    left, right = filters(ours, theirs, mask)
    assert [tuple(x.shape) for x in left + right] == [(3, 9, 32)] * 4
    for side, given in ((filters.student, ours), (filters.teacher, theirs)):
        filtered = side(given, mask)
        for head, logits, rows in zip(side.heads, side.predict(given, mask), filtered, strict=True):
            assert logits.shape == (3, 3)
            torch.testing.assert_close(logits, rows[:, 0] @ head[1].weight.T + head[1].bias)
            assert head[0].p == DROPOUT


@torch.no_grad()
def test_linear_and_mlp_are_the_same_for_every_token():
    for kind in ("linear", "mlp"):
        filters, student, teacher = bound(kind)
        ours, theirs, mask = sides(student, teacher)
        for side, given in ((filters.student, ours), (filters.teacher, theirs)):
            for found, one, rows in zip(side(given, mask), side.filters, given, strict=True):
                maps = [m for m in one.modules() if isinstance(m, nn.Linear)]
                expected = rows @ maps[0].weight.T + maps[0].bias
                if kind == "mlp":
                    assert maps[0].weight.shape == (rows.shape[-1], rows.shape[-1])
                    expected = nn.functional.gelu(expected) @ maps[1].weight.T + maps[1].bias
                torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_later_blocks_leave_debertas_convolution_to_the_first():
    model = tiny_model("deberta-v2", 4, conv_kernel_size=3, position_biased_input=True)
    batch = tiny_batch(model)
    mask, own = batch["attention_mask"].bool(), states(model, batch)
    copied = views.copied_blocks(model, 2, 3)
    found = copied(inputs_embeds=own[1], attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(found[mask], own[3][mask])


@torch.no_grad()
@pytest.mark.parametrize("family", every_family)
@pytest.mark.parametrize(("kind", "reached"), [("next-layer", 2), ("all-next-layers", 4)])
def test_blocks_start_as_what_comes_next_in_the_model(family, kind, reached):
    """So at the start they give the model's own later states, padding or not."""
    teacher, student = tiny_model(family, 4, seed=1), tiny_model(family, 4, seed=2)
    layers = pairs(4, 4, layers=[(1, 1), (4, 4)])
    filters = Filters(32, 32, 2, kind=kind)
    filters.bind(student, teacher, layers, tokens=True)
    filters.eval()
    batch = tiny_batch(teacher)
    mask = batch["attention_mask"].bool()
    for model, side in ((student, filters.student), (teacher, filters.teacher)):
        own = states(model, batch)
        low, high = side([own[1], own[4]], mask)
        torch.testing.assert_close(low[mask], own[reached][mask])
        torch.testing.assert_close(high, side.filters[1](own[4]))
        assert isinstance(side.filters[1], nn.Linear)  # no layer comes after the last
        assert not {p.data_ptr() for p in side.parameters()} & {p.data_ptr() for p in model.parameters()}
        assert all(p.requires_grad for p in side.parameters())


@torch.no_grad()
@pytest.mark.parametrize(("family", "place"), [("bert", lambda size: 0), ("gpt2", lambda size: size - 1)])
def test_heads_read_the_token_that_cls_is(family, place):
    model = tiny_model(family, 4)
    filters = Filters(32, 32, 1, kind="linear")
    filters.bind(model, model, pairs(4, 4, layers=[(2, 2)]), tokens=True)
    side, batch = filters.eval().teacher, tiny_batch(model)
    state = states(model, batch)[2]
    (found,) = side.predict([state], batch["attention_mask"].bool())
    for b, size in enumerate(batch["attention_mask"].sum(1).tolist()):
        torch.testing.assert_close(found[b], side.heads[0](side.filters[0](state[b, place(size)])))


@torch.no_grad()
def test_without_a_filter_the_head_reads_the_state():
    filters, student, teacher = bound(None)
    ours, theirs, mask = sides(student, teacher)
    for side, given in ((filters.student, ours), (filters.teacher, theirs)):
        firsts = [rows[:, 0] for rows in given]
        for found, again, head, first in zip(
            side.predict(given, mask), side.predict(firsts, mask[:, 0]), side.heads, firsts, strict=True
        ):
            torch.testing.assert_close(found, first @ head[1].weight.T + head[1].bias)
            assert torch.equal(found, again)
    assert not filters.fits
    assert bound(None, tiny_model("bert", 2, seed=2))[0].fits


@torch.no_grad()
def test_a_pooled_head_has_a_layer_of_its_own():
    filters, student, teacher = bound(head="pooled")
    ours, _, mask = sides(student, teacher)
    filtered = filters.student(ours, mask)
    for found, head, rows in zip(filters.student.predict(ours, mask), filters.student.heads, filtered, strict=True):
        first, last = (m for m in head if isinstance(m, nn.Linear))
        pooled = nn.functional.gelu(rows[:, 0] @ first.weight.T + first.bias)
        torch.testing.assert_close(found, pooled @ last.weight.T + last.bias)


def made_of(teacher, which):
    return start_student([f"layers({which})"], teacher, teacher, depth=2, labels={"num_labels": 3}, seed=0).student


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_of_the_teachers_layers_can_take_its_filters(kind):
    student = made_of(tiny_model("bert", 4, seed=1), "sanh")
    filters, _, teacher = bound(kind, student)
    assert filters.alike
    with torch.no_grad():
        for parameter in filters.teacher.parameters():
            parameter.add_(0.1)
    ours, theirs, mask = sides(student, teacher)
    same = ours[:1] + theirs[1:]
    differ = zip(filters.student(same, mask), filters.teacher(same, mask), strict=True)
    assert not any(torch.equal(a, b) for a, b in differ)
    filters.copy_to_student()
    equal = zip(filters.student.predict(same, mask), filters.teacher.predict(same, mask), strict=True)
    assert all(torch.equal(a, b) for a, b in equal)
    with torch.no_grad():
        next(filters.student.parameters()).add_(1)  # copies, not the same
    assert not torch.equal(next(filters.student.parameters()), next(filters.teacher.parameters()))


@pytest.mark.parametrize("which", ["first", "[1, 3]"])
def test_a_student_of_other_layers_has_filters_of_its_own(which):
    assert not bound(student=made_of(tiny_model("bert", 4, seed=1), which))[0].alike


def test_a_trained_layer_is_no_longer_the_teachers():
    student = made_of(tiny_model("bert", 4, seed=1), "sanh")
    with torch.no_grad():
        student.bert.encoder.layer[1].output.dense.bias[0] += 1e-3
    assert not bound(student=student)[0].alike


def test_the_teachers_side_gets_no_gradient_from_a_comparison():
    filters, student, teacher = bound("next-layer")
    left, right = filters(*sides(student, teacher))
    assert all(x.requires_grad for x in left)
    assert not any(x.requires_grad for x in right)


def test_a_side_that_does_not_train_has_no_dropout():
    filters = bound("next-layer")[0]
    filters.train()
    assert filters.student.training
    assert filters.teacher.training
    filters.teacher.requires_grad_(False)
    filters.train()
    assert all(module.training for module in filters.student.modules())
    assert not any(module.training for module in filters.teacher.modules())
    filters.eval()
    assert not any(module.training for module in filters.modules())


def test_filters_belong_to_layers():
    filters, student, teacher = bound()
    before = copy.deepcopy(filters.state_dict())
    filters.bind(student, teacher, SANH, tokens=True)
    assert all(torch.equal(before[name], weight) for name, weight in filters.state_dict().items())
    with pytest.raises(LimbeckError, match=r"made for layers \[1, 2\] of the student and \[1, 4\].*\[2, 4\]"):
        filters.bind(student, teacher, pairs(2, 4, layers=[(1, 2), (2, 4)]), tokens=True)
    with pytest.raises(LimbeckError, match="random map"):
        bound(layers=SANH._replace(draw=lambda *_: [0, 1]))


def test_blocks_want_every_token():
    filters = Filters(32, 32, 2, kind="next-layer")
    with pytest.raises(LimbeckError, match="compare hidden"):
        filters.bind(tiny_model(layers=2), tiny_model(layers=4), SANH, tokens=False)


@torch.no_grad()
@pytest.mark.parametrize("family", ["marian", "albert"])
def test_heads_predict_words_as_the_teacher_does(family):
    """With the bias that Marian has beside its output embeddings, and at the width that ALBERT's read."""
    if family == "marian":
        teacher, student = tiny_pair(family, 4, 4), tiny_pair(family, 2, 2, seed=1)
        output, bias = teacher.lm_head, teacher.final_logits_bias[0]
    else:
        teacher, student = (tiny_model(family, n, auto=AutoModelForMaskedLM, seed=n) for n in (4, 2))
        output = teacher.predictions.decoder
        bias = output.bias
    filters = Filters(32, 32, 2)
    filters.bind(student, teacher, SANH, tokens=True)
    given, mask = [torch.randn(3, 9, 32)] * 2, torch.ones(3, 9, dtype=torch.bool)
    side = filters.eval().teacher
    for head, made, rows in zip(side.heads, filters.predict("teacher", given, mask), side(given, mask), strict=True):
        for mapped in head[1:]:
            rows = rows @ mapped.weight.T + mapped.bias
        torch.testing.assert_close(whole(made), rows @ output.weight.T + bias)
