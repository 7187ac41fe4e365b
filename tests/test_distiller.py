"""One module, one forward, every part of the loss; and what that number may not depend on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limbeck.architectures import blocks
from limbeck.distiller import Distiller
from limbeck.errors import LimbeckError
from limbeck.features import LOGITS, Rows
from limbeck.objectives import Heads, Labels, Logits, Match, NamedAligner, Probe
from limbeck.spec import parse
from tests.tiny import every_family, tiny_batch, tiny_model

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def every_kind():
    """A term of each kind, and a match of every kind of row."""
    return {
        "labels": Labels(weight=0.5),
        "logits": Logits("kl(temperature=2, scale=T²)", weight="1/3"),
        "tokens": Match("hidden", map="uniform", align="linear", weight=2),
        "cls": Match("cls", map="uniform(last=false)", align="linear", distance="unit_mse", weight=10),
        "drawn": Match("mean", map="random", align="both(width=8)", distance="unit_sq", weight=3),
        "joined": Match("mean", map="random", align="concat(width=8)", distance="unit_sq", weight=3),
        "maps": Match("attention", map="last", distance="kl"),
        "scores": Match("scores", map="last", distance="mse", weight=0.1),
        "relations": Match("value_relation", map="last", distance="kl"),
        "embedded": Match("embeddings", align="shared"),
        "filtered": Match("hidden", map="uniform", align="filters(next-layer)"),
        "probed": Probe("hidden", map="last", align="filters(all-next-layers)"),
        "said": Heads("cls", map="groups(last=false)", blend="attention", align="filters(none)"),
    }


@pytest.fixture(scope="module")
def pair():
    return tiny_model("bert", 6, width=32, heads=4, seed=1), tiny_model("bert", 3, width=16, heads=2, seed=2)


@pytest.fixture(scope="module")
def whole(pair):
    torch.manual_seed(0)
    return Distiller(*pair, every_kind(), seed=4).eval()


@torch.no_grad()
def test_the_loss_is_the_weighted_sum_of_its_parts(whole):
    whole.at(0, 0)
    output = whole(**tiny_batch())
    weights = {"labels": 0.5, "logits": 1 / 3, "tokens": 2, "cls": 10, "drawn": 3, "joined": 3, "scores": 0.1}
    assert list(output.parts) == list(every_kind())
    assert all(part.shape == () and part > 0 for part in output.parts.values())
    expected = sum(weights.get(name, 1) * part.item() for name, part in output.parts.items())
    assert output.loss.item() == pytest.approx(expected, rel=1e-5)


def parts(distiller, batch, **more):
    with torch.no_grad():
        output = distiller(**batch, **more)
    return output.parts | {"loss": output.loss}


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], **CLOSE, msg=lambda m, name=name: f"{name}: {m}")


@settings(max_examples=10)
@given(st.permutations(range(5)))
def test_the_order_of_examples_means_nothing(whole, order):
    batch = tiny_batch(sizes=(9, 5, 7, 3, 6))
    same(parts(whole, batch), parts(whole, {k: v[order] for k, v in batch.items()}))


@pytest.mark.parametrize("length", [10, 16, 40])
def test_more_padding_means_nothing(whole, length):
    same(parts(whole, tiny_batch()), parts(whole, tiny_batch(length=length)))


@pytest.mark.parametrize("family", every_family)
def test_more_padding_means_nothing_in_any_family(family):
    student, teacher = tiny_model(family, 2, seed=1), tiny_model(family, 4, seed=2)
    distiller = Distiller(teacher, student, every_kind()).eval()
    same(parts(distiller, tiny_batch(student)), parts(distiller, tiny_batch(student, length=20)))


def test_what_stands_in_padding_means_nothing(whole):
    batch = tiny_batch()
    other = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 77)
    same(parts(whole, batch), parts(whole, batch | {"input_ids": other}))


@pytest.mark.parametrize("cuts", [[1, 2], [3], [2, 4], [1, 2, 3, 4]])
def test_a_batch_in_pieces_is_the_whole_batch(whole, cuts):
    batch = tiny_batch(sizes=(9, 5, 7, 3, 6))
    count = torch.tensor(5.0)
    pieces = [
        parts(whole, {k: v[a:b] for k, v in batch.items()}, count=count)
        for a, b in zip([0, *cuts], [*cuts, 5], strict=True)
    ]
    same({name: sum(piece[name] for piece in pieces) for name in pieces[0]}, parts(whole, batch))


def test_pieces_give_the_gradient_of_the_whole(pair):
    torch.manual_seed(0)
    distiller = Distiller(*pair, every_kind()).eval()
    batch = tiny_batch(sizes=(9, 5, 7, 3, 6))

    def gradients(*pieces, **more):
        distiller.zero_grad()
        for piece in pieces:
            distiller(**{k: v[piece] for k, v in batch.items()}, **more).loss.backward()
        return {name: p.grad.clone() for name, p in distiller.named_parameters() if p.grad is not None}

    one = gradients(slice(None))
    other = gradients(slice(0, 2), slice(2, 5), count=torch.tensor(5.0))
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-4, atol=1e-5)


def test_fill_rows_are_left_out(whole):
    batch = tiny_batch()
    filled = {k: torch.cat([v, v[:2].flip(0)]) for k, v in batch.items()}
    weight = torch.tensor([1.0, 1, 1, 0, 0])
    same(parts(whole, batch), parts(whole, filled, weight=weight))
    same(parts(whole, batch), parts(whole, filled, weight=weight, count=torch.tensor(3.0)))
    nothing = parts(whole, batch, weight=torch.zeros(3))
    assert all(part == 0 for part in nothing.values())


def test_every_family_can_teach_and_learn():
    """The sites of two families meet: hidden states, attention, predictions, and each model's own columns."""
    batch = tiny_batch()
    for student, teacher in zip(every_family, (*every_family[1:], every_family[0]), strict=True):
        distiller = Distiller(tiny_model(teacher, 4, seed=1), tiny_model(student, 2, seed=2), every_kind())
        output = distiller(**batch)
        output.loss.backward()
        assert output.loss.isfinite()
        found = [p.grad for _, p in distiller.named_parameters() if p.grad is not None]
        assert all(gradient.isfinite().all() for gradient in found)


def test_the_teacher_is_held_but_not_registered(pair):
    teacher, student = tiny_model("bert", 6, seed=1).train(), tiny_model("bert", 3, seed=2)
    distiller = Distiller(teacher, student, every_kind())
    assert not teacher.training
    distiller.train()
    assert student.training
    assert not any(module.training for module in teacher.modules())
    theirs = {id(p) for p in teacher.parameters()}
    assert not theirs & {id(p) for p in distiller.parameters()}
    assert not any(module is teacher for module in distiller.modules())
    ours = sum(p.numel() for p in student.parameters())
    aligners = sum(p.numel() for n, p in distiller.named_parameters() if not n.startswith("student."))
    assert sum(p.numel() for p in distiller.parameters()) == ours + aligners
    assert all(name.startswith(("student.", "objectives.")) for name in distiller.state_dict())
    batch = tiny_batch()
    distiller(**batch).loss.backward()
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    assert any(p.grad is not None for p in student.parameters())


def test_the_teachers_features_are_the_same_in_train_and_eval(pair):
    distiller = Distiller(*pair, [Match("cls", map="last", align="linear")])
    batch = tiny_batch()
    quiet = distiller.eval().teacher.features(**batch)
    loud = distiller.train().teacher.features(**batch)
    for site, rows in quiet.items():
        assert torch.equal(rows.values, loud[site].values)
        assert not rows.values.requires_grad


def test_the_teacher_runs_no_deeper_than_its_deepest_layer_read(pair):
    teacher, student = pair
    ran = []
    handles = [block.register_forward_hook(lambda *_, k=k: ran.append(k)) for k, block in enumerate(blocks(teacher), 1)]
    distiller = Distiller(teacher, student, [Labels(), Match("cls", map="uniform(last=false)", align="linear")])
    distiller(**tiny_batch())
    for handle in handles:
        handle.remove()
    assert ran == [1, 2, 3, 4]


def test_terms_of_weight_0_are_dropped_and_named(pair):
    objectives = {
        "labels": Labels(),
        "off": Match("cls", map="last", align="linear", weight=0),
        "never": Logits(weight="ramp(0)"),
        "later": Logits(weight="ramp(1)"),
    }
    distiller = Distiller(*pair, objectives)
    assert distiller.dropped == ["off", "never"]
    assert list(distiller.terms) == ["labels", "later"]
    assert list(distiller(**tiny_batch()).parts) == ["labels", "later"]
    assert not any(name.startswith("objectives.off") for name in distiller.state_dict())
    with pytest.raises(LimbeckError, match="nothing to minimise"):
        Distiller(*pair, [Labels(weight=0)])
    with pytest.raises(LimbeckError, match="nothing to minimise"):
        Distiller(*pair, [])


def test_weights_and_draws_move_in_place(pair):
    distiller = Distiller(
        *pair,
        {
            "labels": Labels(weight="ramp(2, over=0.5)"),
            "drawn": Match("mean", map="random", align="both(width=8)", weight=1),
        },
        steps=100,
    )
    places = {name: buffer.data_ptr() for name, buffer in distiller.named_buffers()}
    objects = {name: id(buffer) for name, buffer in distiller.named_buffers()}
    labels, drawn = distiller.terms["labels"], distiller.terms["drawn"]
    seen = set()
    for epoch, step, weight in [(0, 0, 0.0), (1, 25, 1.0), (2, 50, 2.0), (3, 100, 2.0)]:
        distiller.at(epoch, step)
        assert labels.scale.item() == pytest.approx(weight)
        assert drawn.scale.item() == 1
        seen.add(tuple(drawn.draw.tolist()))
    assert len(seen) > 1
    assert {name: buffer.data_ptr() for name, buffer in distiller.named_buffers()} == places
    assert {name: id(buffer) for name, buffer in distiller.named_buffers()} == objects
    distiller.at(0, 0)
    assert tuple(drawn.draw.tolist()) == tuple(drawn.layers.draw(0, 0, 0))


def test_draws_depend_on_seed_and_stage(pair):
    def draws(**options):
        distiller = Distiller(*pair, {"drawn": Match("mean", map="random", align="both(width=8)")}, **options)
        found = []
        for epoch in range(6):
            distiller.at(epoch, 0)
            found.append(distiller.terms["drawn"].pairs())
        return found

    assert draws(seed=1) == draws(seed=1)
    assert draws(seed=1) != draws(seed=2)
    assert draws(seed=1) != draws(seed=1, stage=1)


def test_schedules_and_draws_are_no_state(whole):
    """A resumed run sets them anew from where it stands: they are saved nowhere."""
    assert not any(name.endswith((".scale", ".draw")) for name in whole.state_dict())


def test_features_of_the_teacher_may_be_given(pair):
    torch.manual_seed(0)
    distiller = Distiller(*pair, every_kind()).eval()
    batch = tiny_batch()
    features = distiller.teacher.features(**batch)
    ran = []
    handle = blocks(pair[0])[0].register_forward_hook(lambda *_: ran.append(1))
    given_ = parts(distiller, batch, teacher_features=features)
    assert not ran
    own = parts(distiller, batch)
    assert ran
    handle.remove()
    same(given_, own)
    changed = {site: Rows(rows.values * 1.5, rows.mask) for site, rows in features.items()}
    assert parts(distiller, batch, teacher_features=changed)["tokens"] != own["tokens"]


def test_layer_weights_are_those_of_the_terms(pair):
    teacher, student = pair
    terms = {
        "logits": Logits(),
        "layers": Match("cls", map="uniform", align="linear"),
        "mean": Match("mean", map="last", align="linear"),
    }
    distiller = Distiller(teacher, student, terms)
    found = distiller.layer_weights(**tiny_batch(student))
    assert found.keys() == {"layers", "mean"}  # predictions have none
    assert found["mean"].tolist() == [[1.0]]
    sides = distiller.tap(**tiny_batch(student)), distiller.teacher.features(**tiny_batch(student))
    assert torch.equal(found["layers"], distiller.terms["layers"].layer_weights(*sides, {}))


def test_parts_of_a_list_are_named_by_their_kind(pair):
    objectives = [
        Labels(),
        Logits(),
        Match("cls", map="last", align="linear"),
        Match("mean", map="last", align="linear"),
        Labels(weight=2),
    ]
    distiller = Distiller(*pair, objectives)
    assert list(distiller.terms) == ["labels", "logits", "match", "match-2", "labels-2"]
    assert list(distiller.terms.values()) == objectives


def test_without_a_teacher():
    student = tiny_model("bert", 2)
    distiller = Distiller(None, student, [Labels()])
    assert distiller.teacher is None
    assert distiller(**tiny_batch(student)).loss > 0
    for objective in (Logits(), Match("cls", map="last")):
        with pytest.raises(LimbeckError, match="--teacher"):
            Distiller(None, student, [objective])


def test_a_teacher_nobody_reads_is_not_kept(pair):
    assert Distiller(*pair, [Labels()]).teacher is None


def test_one_number_of_labels_is_a_regression():
    teacher, student = tiny_model(labels=1, seed=1), tiny_model(labels=1, layers=2, seed=2)
    distiller = Distiller(teacher, student, [Labels(), Logits("kl(temperature=2)")]).eval()
    batch = tiny_batch(student)
    with torch.no_grad():
        output = distiller(**batch)
        ours = student(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"]).logits[:, 0]
        theirs = teacher(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"]).logits[:, 0]
    torch.testing.assert_close(output.parts["labels"], (ours - batch["labels"]).square().mean())
    torch.testing.assert_close(output.parts["logits"], (ours - theirs).square().mean())


def test_reads_are_the_union_of_the_terms(whole):
    reads = whole.reads()
    assert reads == set().union(*(term.reads() for term in whole.terms.values()))
    assert ("student", "logits", LOGITS) in reads
    assert {layer for model, name, layer in reads if (model, name) == ("teacher", "mean")} == {1, 2, 3, 4, 5}


def test_a_named_aligner_lives_across_distillers(pair):
    named = {"task": NamedAligner(parse("linear"))}
    one = Distiller(*pair, {"a": Match("cls", map="last", align="task")}, aligners=named)
    other = Distiller(*pair, {"b": Match("hidden", map="last", align="task")}, aligners=named)
    assert one.terms["a"].aligner is other.terms["b"].aligner


def test_aligners_train_and_are_saved(pair):
    distiller = Distiller(*pair, {"a": Match("cls", map="last", align="linear")})
    names = [name for name, p in distiller.named_parameters() if p.requires_grad and not name.startswith("student.")]
    assert names == ["objectives.a.aligner.maps.0.weight", "objectives.a.aligner.maps.0.bias"]


@pytest.mark.parametrize("name", ["values", "keys", "type", "half", "a.b"])
def test_a_term_may_not_be_named_like_the_insides_of_a_module(pair, name):
    with pytest.raises(LimbeckError, match="name"):
        Distiller(*pair, {name: Labels()})


def test_an_example_without_a_token_does_not_spoil_the_batch(pair):
    teacher, student = pair
    distiller = Distiller(teacher, student, [Match("attention", map="last", distance="kl")])
    batch = tiny_batch(student)
    batch["attention_mask"][0] = 0
    loss = distiller(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in distiller.parameters() if p.grad is not None)


def test_the_teacher_moves_with_the_distiller(pair):
    teacher, student = pair
    distiller = Distiller(teacher, student, [Logits()]).double()
    assert {p.dtype for p in distiller.teacher.model.parameters()} == {torch.float64}
