"""Terms that read layers through heads: what they read, what they move, and what they refuse."""

from functools import partial

import pytest
import torch

from limbeck.distiller import Distiller
from limbeck.errors import LimbeckError
from limbeck.features import LOGITS
from limbeck.initialisers import start_student
from limbeck.objectives import Heads, Labels, Match, NamedAligner, Probe, Read, build
from limbeck.spec import parse
from tests.tiny import tiny_batch, tiny_model

HIDDEN = {Read("teacher", "hidden", k) for k in (1, 4, 6)}


@pytest.fixture(scope="module")
def teacher():
    return tiny_model("bert", 6, seed=1)


@pytest.fixture(scope="module")
def stranger():
    return tiny_model("bert", 3, width=16, heads=2, seed=2)


def made_of(teacher, which="sanh"):
    return start_student([f"layers({which})"], teacher, teacher, depth=3, labels={"num_labels": 3}, seed=0).student


def test_a_probe_reads_what_it_teaches(teacher, stranger):
    def reads(student, **options):
        return Distiller(teacher, student, [Probe("hidden", map="sanh", **options)]).reads()

    assert reads(stranger) == HIDDEN | {Read("student", "hidden", k) for k in (1, 2, 3)}
    assert reads(stranger, of="teacher") == HIDDEN
    assert reads(made_of(teacher)) == HIDDEN
    assert len(reads(made_of(teacher, "first"))) == 6  # not the layers that meet


def test_a_student_nobody_reads_does_not_run(teacher):
    student = made_of(teacher)
    distiller = Distiller(teacher, student, [Probe("hidden", map="sanh")])
    student.register_forward_pre_hook(lambda *_: pytest.fail("the student ran"))
    student.bert.embeddings.register_forward_pre_hook(lambda *_: pytest.fail("the student ran"))
    distiller(**tiny_batch(student)).loss.backward()
    assert all(p.grad is None for p in student.parameters())


def filters_after(teacher, student, **options):
    """The teacher's and the student's filters, after a step of probing."""
    distiller = Distiller(teacher, student, {"probe": Probe("hidden", map="sanh", **options)})
    filters = distiller.terms["probe"].aligner
    start = {name: weight.clone() for name, weight in filters.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in filters.parameters() if p.requires_grad], lr=0.1)
    distiller(**tiny_batch(student)).loss.backward()
    optimizer.step()
    distiller.finish()
    now = filters.state_dict()
    moved = {name for name in start if not torch.equal(start[name], now[name])}
    theirs = {name.replace("teacher.", "student."): weight for name, weight in now.items() if "teacher." in name}
    same = all(now[n].shape == weight.shape and torch.equal(now[n], weight) for n, weight in theirs.items())
    return {name.split(".")[0] for name in moved}, same


def test_what_a_probe_moves(teacher, stranger):
    assert filters_after(teacher, stranger) == ({"student", "teacher"}, False)
    assert filters_after(teacher, stranger, of="teacher") == ({"teacher"}, False)
    assert filters_after(teacher, made_of(teacher)) == ({"student", "teacher"}, True)
    assert filters_after(teacher, made_of(teacher), of="teacher") == ({"teacher"}, False)


@pytest.mark.parametrize("term", [Match("hidden", map="sanh", align="task"), Heads("hidden", map="sanh", align="task")])
def test_comparing_never_moves_the_teachers_side(teacher, stranger, term):
    named = {"task": NamedAligner(parse("filters"))}
    distiller = Distiller(teacher, stranger, [term], aligners=named)
    distiller(**tiny_batch(stranger)).loss.backward()
    filters = named["task"].module
    assert all(p.grad is None for p in filters.teacher.parameters())
    assert all(p.grad.abs().sum() > 0 for p in filters.student.filters.parameters())
    heads = [p.grad is not None for p in filters.student.heads.parameters()]
    assert all(heads) if isinstance(term, Heads) else not any(heads)
    stranger.zero_grad()


def test_a_blend_of_predictions_is_a_target(teacher, stranger):
    """The student is not drawn through the weights of the blend."""
    heads = Heads("cls", map="groups(last=false)", blend="attention", align="filters(none)")
    distiller = Distiller(teacher, stranger, {"outputs": heads}).eval()
    batch = tiny_batch(stranger)
    seen = []

    def apart(one, target):
        seen.append(target.requires_grad)
        return (one - target).square().mean(-1)

    heads.distance = partial(apart)
    distiller(**batch)
    assert seen == [False, False]


def test_grouped_layers_all_meet(teacher, stranger):
    term = Heads("cls", map="groups(last=false)", blend="attention", align="filters(none)")
    distiller = Distiller(teacher, stranger, {"outputs": term})
    batch = tiny_batch(stranger)
    weights = term.layer_weights(distiller.tap(**batch), distiller.teacher.features(**batch), batch)
    torch.testing.assert_close(weights.sum(1), torch.ones(2))
    assert term.pairs() == [(s, t) for s in (1, 2) for t in (1, 2, 3, 4, 5)]
    assert term.reads() == {Read("student", "cls", s) for s in (1, 2)} | {
        Read("teacher", "cls", t) for t in range(1, 6)
    }


@pytest.mark.parametrize(
    ("term", "said"),
    [
        (Probe("hidden", map="sanh", align="linear"), "no heads.*filters"),
        (Heads("hidden", map="sanh", align="linear"), "no heads.*filters"),
        (Heads("cls", map="groups", blend="combine"), "only layers are combined.*blend: attention"),
        (Heads("cls", map="groups"), "one needs the other"),
        (Match("cls", map="sanh", align="filters(none)"), "width 16.*width 32"),
        (Probe("cls", map="sanh", align="filters(next-layer)"), "compare hidden"),
        (Probe("hidden", map="random"), "random map"),
    ],
)
def test_what_does_not_fit(teacher, stranger, term, said):
    with pytest.raises(LimbeckError, match=said):
        Distiller(teacher, stranger, [term])


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"probe": "hidden", "map": "sanh", "of": "student"}, "Allowed: both, teacher"),
        ({"probe": "hidden"}, "needs a map"),
        ({"probe": "hidden", "map": "sanh", "distance": "kl"}, 'no option "distance"'),
        ({"heads": "hidden", "map": "sanh", "distance": "cosine"}, 'no prediction distance "cosine"'),
        ({"heads": "hidden", "map": "sanh", "align": "filters(liner)"}, "liner"),
    ],
)
def test_faults_of_a_declaration(declared, said):
    with pytest.raises(LimbeckError, match=said):
        build(declared)


def test_a_second_term_with_other_layers_is_refused(teacher, stranger):
    named = {"task": NamedAligner(parse("filters"))}
    Distiller(teacher, stranger, [Probe("hidden", map="sanh", align="task")], aligners=named)
    with pytest.raises(LimbeckError, match="same map"):
        Distiller(teacher, stranger, [Match("hidden", map="uniform", align="task")], aligners=named)


def test_labels_beside_probes_read_the_student_again(teacher):
    distiller = Distiller(teacher, made_of(teacher), [Labels(), Probe("hidden", map="sanh")])
    assert distiller.reads() == HIDDEN | {Read("student", "logits", LOGITS)}
