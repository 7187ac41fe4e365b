"""The terms of a loss: one number an example, what each reads, and what it says when it cannot be bound."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from limbeck.aligners import ALIGNERS, Concat, Linear
from limbeck.architectures import Shape
from limbeck.data.kinds import KINDS
from limbeck.data.kinds.question_answering import LOW
from limbeck.errors import LimbeckError
from limbeck.features import LOGITS, Rows
from limbeck.objectives import (
    OBJECTIVES,
    Labels,
    Logits,
    Match,
    Models,
    Moment,
    NamedAligner,
    Read,
    build,
    per_example,
)
from limbeck.spec import parse

SIZES, LENGTH = (4, 2, 3), 4
MASK = torch.arange(LENGTH) < torch.tensor(SIZES)[:, None]


def models(student=(3, 8, 2, 3), teacher=(6, 8, 2, 3), regression=False):
    kind = KINDS["regression" if regression else "classification"]
    return Models(Shape(*student), Shape(*teacher) if teacher else None, kind)


def bound(objective, named=None, **shapes):
    objective.bind(models(**shapes), named or {})
    objective.at(Moment())
    return objective


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_row(values):
    return Rows(values, torch.ones(values.shape[:-1], dtype=torch.bool))


def logits_of(*values):
    return {("logits", LOGITS): one_row(torch.tensor(values, dtype=torch.float64))}


def log_softmax(v, temperature=1.0):
    total = math.log(sum(math.exp(x / temperature) for x in v))
    return [x / temperature - total for x in v]


OURS = [[1.0, -0.5, 0.25], [0.0, 2.0, 1.0], [-1.0, 0.5, 3.0]]
THEIRS = [[0.5, 0.5, -1.0], [3.0, 0.0, 1.0], [0.0, 0.0, 0.0]]


def test_labels_are_cross_entropy():
    objective = bound(Labels())
    found = objective(logits_of(*OURS), {}, {"labels": torch.tensor([2, 0, 1])})
    assert found.tolist() == pytest.approx([-log_softmax(v)[y] for v, y in zip(OURS, [2, 0, 1])], rel=1e-12)


def test_labels_of_a_regression_task_are_squared_errors():
    objective = bound(Labels(), student=(3, 8, 2, 1), teacher=(6, 8, 2, 1), regression=True)
    for labels in (torch.tensor([1.5, 0.0, -2.0]), torch.tensor([1, 0, -2])):
        found = objective(logits_of([0.5], [3.0], [-2.0]), {}, {"labels": labels})
        expected = [(o - y) ** 2 for o, y in zip([0.5, 3.0, -2.0], labels.tolist())]
        assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("call", "t", "scale"), [("kl", 1, 1), ("kl(temperature=10)", 10, 1), ("kl(2, T²)", 2, 4)])
def test_logits_are_the_divergence_from_the_teacher(call, t, scale):
    found = bound(Logits(call))(logits_of(*OURS), logits_of(*THEIRS), {})
    expected = [
        scale * sum(math.exp(b) * (b - a) for a, b in zip(log_softmax(s, t), log_softmax(u, t)))
        for s, u in zip(OURS, THEIRS)
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("call", ["kl(temperature=10, scale=T²)", "soft_ce", "mse"])
def test_logits_of_a_regression_task_are_squared_differences(call):
    objective = bound(Logits(call), student=(3, 8, 2, 1), teacher=(6, 8, 2, 1), regression=True)
    found = objective(logits_of([0.5], [3.0], [1.0]), logits_of([1.0], [0.0], [1.0]), {})
    assert found.tolist() == pytest.approx([0.25, 9.0, 0.0])


@pytest.mark.parametrize("call", ["kl(temperature=2, mean=true)", "mse"])
def test_padding_is_no_class(call):
    """Where classes are positions, an example's loss must not depend on how long its batch is."""
    distance = bound(Logits(call)).distance
    ours, theirs = (torch.tensor(rows, dtype=torch.double) for rows in (OURS, THEIRS))
    expected = (ours - theirs).square().mean(-1)
    if call != "mse":
        a, b = (torch.log_softmax(rows / 2, -1) for rows in (ours, theirs))
        expected = (b.exp() * (b - a)).mean(-1)
    for more in (0, 5):
        found = distance(*(F.pad(rows, (0, more), value=LOW) for rows in (ours, theirs)))
        torch.testing.assert_close(found, expected)


def test_logits_of_models_with_other_labels_are_refused():
    with pytest.raises(LimbeckError, match=r"3 labels.*2"):
        bound(Logits(), teacher=(6, 8, 2, 2))
    with pytest.raises(LimbeckError, match=r"1 labels.*3"):
        bound(Logits(), student=(3, 8, 2, 1), regression=True)


def features(objective, name, make):
    """Rows for every site an objective reads."""
    sides = {"student": {}, "teacher": {}}
    for read in sorted(objective.reads()):
        assert read.feature == name
        sides[read.model][read.feature, read.layer] = make(read.model, read.layer)
    return sides["student"], sides["teacher"]


def tokens(model, layer):
    return Rows(draw(len(SIZES), LENGTH, 8, seed=100 * (model == "teacher") + layer), MASK)


@pytest.mark.parametrize("reduce", ["sum_layers", "mean_layers"])
def test_a_match_is_its_loops(reduce):
    objective = bound(Match("hidden", map="uniform", distance="mse", reduce=reduce))
    student, teacher = features(objective, "hidden", tokens)
    found = objective(student, teacher, {})
    for b, size in enumerate(SIZES):
        layers = []
        for s, t in [(1, 2), (2, 4), (3, 6)]:
            ours, theirs = student["hidden", s].values[b].tolist(), teacher["hidden", t].values[b].tolist()
            rows = [sum((x - y) ** 2 for x, y in zip(ours[i], theirs[i])) / 8 for i in range(size)]
            layers.append(sum(rows) / size)
        expected = sum(layers) / (3 if reduce == "mean_layers" else 1)
        assert found[b].item() == pytest.approx(expected, rel=1e-12)


def test_a_match_of_scores_counts_valid_heads_queries_and_keys_alike():
    objective = bound(Match("scores", map="last", distance="mse"))
    valid = (MASK[:, None, :, None] & MASK[:, None, None, :]).expand(-1, 2, -1, -1)

    def make(model, layer):
        return Rows(draw(len(SIZES), 2, LENGTH, LENGTH, 1, seed=len(model) + layer), valid)

    student, teacher = features(objective, "scores", make)
    found = objective(student, teacher, {})
    for b, size in enumerate(SIZES):
        squares = [
            (student["scores", 3].values[b, h, i, j, 0] - teacher["scores", 6].values[b, h, i, j, 0]).item() ** 2
            for h in range(2)
            for i in range(size)
            for j in range(size)
        ]
        assert found[b].item() == pytest.approx(sum(squares) / len(squares), rel=1e-12)


def test_an_aligned_match_maps_the_student():
    objective = bound(Match("cls", map="uniform(last=false)", align="linear"), student=(3, 4, 2, 3)).double()
    assert isinstance(objective.aligner, Linear)
    assert len(objective.aligner.maps) == 2

    def make(model, layer):
        return one_row(draw(3, 4 if model == "student" else 8, seed=len(model) + layer))

    student, teacher = features(objective, "cls", make)
    found = objective(student, teacher, {})
    expected = [
        (objective.aligner.maps[i](student["cls", s].values) - teacher["cls", t].values).square().mean(-1)
        for i, (s, t) in enumerate([(1, 2), (2, 4)])
    ]
    torch.testing.assert_close(found, sum(expected))


def test_joined_layers_are_one_comparison():
    for reduce in ("sum_layers", "mean_layers"):
        objective = bound(Match("mean", map="uniform", align="concat(width=5)", distance="unit_sq", reduce=reduce))
        objective.double()
        assert isinstance(objective.aligner, Concat)
        student, teacher = features(
            objective, "mean", lambda model, layer: one_row(draw(3, 8, seed=len(model) + layer))
        )
        found = objective(student, teacher, {})
        assert found.shape == (3,)
        assert (found <= 4).all()


def test_rows_that_do_not_count_do_not_count():
    distances = draw(3, 2, 4)
    mask = torch.rand(3, 2, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    found = per_example(distances, mask)
    for b in range(3):
        rows = [distances[b, i, j].item() for i in range(2) for j in range(4) if mask[b, i, j]]
        assert found[b].item() == pytest.approx(sum(rows) / len(rows))
    assert per_example(distances, torch.zeros_like(mask)).tolist() == [0, 0, 0]
    torch.testing.assert_close(per_example(distances + 1e6 * ~mask, mask), found)


def site(name, *layers, model="student"):
    return {Read(model, name, layer) for layer in layers}


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (Labels(), site("logits", -1)),
        (Logits(), site("logits", -1) | site("logits", -1, model="teacher")),
        (Match("cls", map="last"), site("cls", 3) | site("cls", 6, model="teacher")),
        (Match("embeddings"), site("embeddings", 0) | site("embeddings", 0, model="teacher")),
        (Match("logits"), site("logits", -1) | site("logits", -1, model="teacher")),
        (Match("hidden", map="uniform"), site("hidden", 1, 2, 3) | site("hidden", 2, 4, 6, model="teacher")),
        (
            Match("hidden", map="uniform(embeddings=true)"),
            site("hidden", 0, 1, 2, 3) | site("hidden", 0, 2, 4, 6, model="teacher"),
        ),
        (Match("mean", map="random"), site("mean", 1, 2) | site("mean", 1, 2, 3, 4, 5, model="teacher")),
        (
            Match("attention(heads=4)", map="last", distance="kl"),
            site("attention(heads=4)", 3) | site("attention(heads=4)", 6, model="teacher"),
        ),
    ],
)
def test_what_is_read(objective, expected):
    assert bound(objective).reads() == expected


def test_a_random_map_compares_the_layers_drawn():
    objective = bound(Match("mean", map="random", distance="mse"))
    student, teacher = features(objective, "mean", lambda model, layer: one_row(draw(3, 8, seed=layer * len(model))))
    seen = set()
    for epoch in range(8):
        objective.at(Moment(seed=3, stage=1, epoch=epoch))
        pairs = objective.pairs()
        seen.add(tuple(pairs))
        assert [s for s, _ in pairs] == [1, 2]
        expected = sum((student["mean", s].values - teacher["mean", t].values).square().mean(-1) for s, t in pairs)
        torch.testing.assert_close(objective(student, teacher, {}), expected)
    assert len(seen) > 3


def test_a_draw_moves_in_place():
    objective = bound(Match("mean", map="random", weight="ramp(2)"))
    places = objective.draw.data_ptr(), objective.scale.data_ptr()
    values = set()
    for epoch in range(6):
        objective.at(Moment(epoch=epoch, progress=epoch / 6))
        values.add((tuple(objective.draw.tolist()), objective.scale.item()))
    assert (objective.draw.data_ptr(), objective.scale.data_ptr()) == places
    assert len(values) == 6


@pytest.mark.parametrize(
    ("weight", "at"),
    [
        (2, {0.0: 2, 0.5: 2, 1.0: 2}),
        ("1/3", {0.0: 1 / 3, 1.0: 1 / 3}),
        ("0.25", {0.0: 0.25, 1.0: 0.25}),
        ("ramp(0.1)", {0.0: 0.0, 0.25: 0.025, 0.5: 0.05, 1.0: 0.1}),
        ("ramp(0.1, over=0.5)", {0.0: 0.0, 0.25: 0.05, 0.5: 0.1, 0.75: 0.1, 1.0: 0.1}),
        ("ramp(weight=1/2)", {0.5: 0.25, 1.0: 0.5}),
        ("stairs(0.2, steps=4)", {0.0: 0.0, 0.2: 0.0, 0.25: 0.05, 0.49: 0.05, 0.5: 0.1, 0.99: 0.15}),
        ("stairs(1, steps=20)", {k * 7 / (20 * 7): k / 20 for k in range(20)}),  # a step an epoch of 7 batches
    ],
)
def test_weights_over_the_progress_of_a_stage(weight, at):
    objective = Labels(weight=weight)
    for progress, expected in at.items():
        objective.at(Moment(progress=progress))
        assert objective.scale.item() == pytest.approx(expected, rel=1e-6)
    assert not objective.idle


@given(st.floats(0, 1), st.floats(0.01, 1))
def test_a_ramp_rises_and_stays(progress, over):
    schedule = Labels(weight=f"ramp(3, over={over})").schedule
    assert 0 <= schedule(progress) <= 3
    assert schedule(progress) <= schedule(min(progress + 0.1, 1))
    assert schedule(1.0) == 3


@pytest.mark.parametrize(
    ("weight", "idle"), [(0, True), ("0", True), ("ramp(0)", True), ("ramp(1)", False), (1, False)]
)
def test_a_term_is_idle_if_its_weight_is_0_throughout(weight, idle):
    assert Labels(weight=weight).idle is idle


@pytest.mark.parametrize("weight", ["rampp(1)", "heavy", "ramp", "ramp(x)", None, True, "1/0", "ramp(1, over=0)", [1]])
def test_what_is_no_weight(weight):
    with pytest.raises(LimbeckError):
        Labels(weight=weight)


@pytest.mark.parametrize(
    ("match", "shapes", "said"),
    [
        (Match("cls", map="last"), {"student": (3, 4, 2, 3)}, "width 4.*width 8.*align: linear"),
        (Match("mean", map="last"), {"student": (3, 4, 2, 3)}, "width 4.*width 8"),
        (Match("logits"), {"teacher": (6, 8, 2, 2)}, "width 3.*width 2"),
        (Match("cls", map="uniform(last=false)"), {"student": (1, 8, 2, 3)}, "compares no layer.*1 layers"),
        (Match("cls", map="random"), {"student": (1, 8, 2, 3)}, "compares no layer"),
        (Match("cls", map="pairs([[4, 1]])"), {}, r"\[4, 1\] is out of range"),
        (Match("attention", map="uniform(embeddings=true)"), {}, "layer 0 of a student with 3"),
        (Match("scores", map="pairs([[1, 0]])"), {}, "layer 0 of a teacher with 6"),
        (Match("cls", map="first"), {"student": (7, 8, 2, 3)}, "student has 7 layers and the teacher 6"),
        (Match("attention", map="last", align="linear"), {}, "positions, not widths"),
        (Match("cls", map="last"), {"teacher": None}, "needs a teacher"),
        (Match("attention", map="last"), {"student": (3, 9, 3, 3)}, "neither 3 nor 2 heads.*heads=…"),
        (Match("attention(heads=3)", map="last"), {}, "3 heads"),
        (Match("query_relation(heads=16)", map="last"), {}, "16 heads"),
        (Match("query_relation(size=3)", map="last"), {}, "size 3 does not divide the teacher's width, 8"),
        (Match("query_relation(heads=2, size=4)", map="last"), {}, "heads or size, not both"),
        (Match("query_relation(size=1)", map="last"), {"student": (3, 4, 2, 3)}, "8 heads do not divide both widths"),
    ],
)
def test_models_that_do_not_fit(match, shapes, said):
    with pytest.raises(LimbeckError, match=said):
        bound(match, **shapes)


@pytest.mark.parametrize(
    ("student", "teacher", "heads"),
    [
        ((3, 32, 2, 3), (6, 32, 4, 3), "(heads=4)"),  # the larger count
        ((3, 32, 4, 3), (6, 32, 2, 3), "(heads=4)"),
        ((3, 18, 2, 3), (6, 32, 4, 3), "(heads=2)"),  # 4 does not divide 18
        ((3, 24, 3, 3), (6, 32, 2, 3), "(heads=2)"),
        ((3, 16, 4, 3), (6, 32, 4, 3), ""),  # equal counts stay as they are
    ],
)
def test_models_with_other_head_counts_meet_in_one_that_divides_both(student, teacher, heads):
    for name in ("attention", "scores", "value_relation", "query_relation", "key_relation"):
        objective = bound(Match(name, map="last"), student=student, teacher=teacher)
        assert {read.feature for read in objective.reads()} == {name + heads}


def test_heads_named_in_the_recipe_win():
    objective = bound(Match("value_relation(heads=8)", map="last"), student=(3, 32, 2, 3), teacher=(6, 64, 4, 3))
    assert {read.feature for read in objective.reads()} == {"value_relation(heads=8)"}


@pytest.mark.parametrize("student", [32, 64, 16])
def test_a_size_is_that_of_the_teachers_heads_and_both_have_as_many(student):
    objective = bound(Match("key_relation(size=16)", map="last"), student=(3, student, 2, 3), teacher=(6, 64, 2, 3))
    assert {read.feature for read in objective.reads()} == {"key_relation(heads=4)"}


def test_heads_whose_widths_do_not_add_up_are_cut_as_wide_as_they_are():
    narrow, wide = (3, 32, 2, 3, 0, None, 24), (6, 32, 4, 3, 0, None, 24)  # 48 and 96 are attended in
    objective = bound(Match("key_relation(size=12)", map="last"), student=narrow, teacher=wide)
    assert {read.feature for read in objective.reads()} == {"key_relation(heads=8)"}
    with pytest.raises(LimbeckError, match="size 64 does not divide the teacher's width, 96"):
        bound(Match("key_relation(size=64)", map="last"), student=narrow, teacher=wide)
    with pytest.raises(LimbeckError, match="32 heads do not divide both widths, 48 and 96"):
        bound(Match("attention(heads=32)", map="last"), student=narrow, teacher=wide)


def test_a_named_aligner_is_made_once():
    named = {"task": NamedAligner(parse("linear"))}
    one = bound(Match("cls", map="uniform", align="task"), named, student=(3, 4, 2, 3))
    other = bound(Match("hidden", map="uniform", align="task"), named, student=(3, 4, 2, 3))
    assert one.aligner is other.aligner
    assert len(one.aligner.maps) == 3


def test_a_named_aligner_for_other_layers_drops_none_of_them():
    """Two terms of one map each would otherwise compare as many layers as the first has."""
    named = {"task": NamedAligner(parse("linear"))}
    bound(Match("cls", map="last", align="task"), named, student=(3, 4, 2, 3))
    with pytest.raises(LimbeckError, match="differ in widths or in how many layers"):
        bound(Match("hidden", map="uniform", align="task"), named, student=(3, 4, 2, 3))


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({}, ["exactly one of labels, logits, match", "none of them"]),
        ({"weight": 1}, ["none of them"]),
        ({"labels": "cross_entropy", "logits": "kl"}, ["exactly one", "labels and logits"]),
        ({"labels": "cross_entropy", "wieght": 1}, ['"labels" has no option "wieght"', 'Did you mean "weight"?']),
        ({"labels": "cross_entropy", "map": "last"}, ['no option "map"', "Allowed: inputs, weight"]),
        ({"match": "cls", "map": "last", "algin": "linear"}, ['Did you mean "align"?']),
        ({"match": "cls", "map": "last", "align": "liner"}, ['no aligner "liner"', 'Did you mean "linear"?']),
        ({"match": "cls", "map": "last", "align": "linear(width=2)"}, ['no option "width"']),
        ({"match": "cls", "map": "lst"}, ['no map "lst"', 'Did you mean "last"?']),
        ({"match": "cls"}, ["needs a map", "uniform"]),
        ({"match": "embeddings", "map": "last"}, ["one layer only", "leave out map"]),
        ({"match": "clss", "map": "last"}, ['no feature "clss"', 'Did you mean "cls"?']),
        ({"match": "cls", "map": "last", "distance": "mze"}, ['no distance "mze"', 'Did you mean "mse"?']),
        ({"match": "cls", "map": "last", "reduce": "mean"}, ['no reduction "mean"', "mean_layers"]),
        ({"logits": "kl(temprature=2)"}, ['Did you mean "temperature"?']),
        ({"logits": "cosine"}, ['no prediction distance "cosine"', "kl, mse, soft_ce"]),
        ({"labels": "hinge"}, ['no label loss "hinge"', "cross_entropy"]),
        ({"labels": "cross_entropy", "weight": "rmp(1)"}, ['no weight "rmp"', 'Did you mean "ramp"?']),
        ({"labels": "cross_entropy", 7: 1}, ['no option "7"']),
    ],
)
def test_faults_of_a_declaration(declared, said):
    with pytest.raises(LimbeckError) as caught:
        build(declared)
    for part in said:
        assert part in str(caught.value)


def test_a_declaration_is_built():
    objective = build(
        {"weight": "1/2", "distance": "unit_mse", "match": "cls", "map": "uniform", "align": "mine"}, {"mine": "linear"}
    )
    assert isinstance(objective, Match)
    assert objective.schedule(0.3) == 0.5
    assert isinstance(build({"labels": "cross_entropy"}), Labels)
    assert isinstance(build({"logits": "kl"}), Logits)
    assert {"labels", "logits", "match", "probe", "heads"} <= set(OBJECTIVES)


@pytest.mark.parametrize("feature", ["cls", "mean", "hidden", "scores"])
@pytest.mark.parametrize("distance", ["kl", "soft_ce"])
def test_a_distance_of_distributions_refuses_vectors(feature, distance):
    with pytest.raises(LimbeckError, match="distributions"):
        Match(feature, map="last", distance=distance)


@pytest.mark.parametrize(
    "declared",
    [
        {"logits": "kl(temperature=0)"},
        {"match": "attention(heads=0)", "map": "last", "distance": "kl"},
        {"match": "cls", "map": "last", "align": "both(width=0)"},
        {"labels": "cross_entropy", "weight": "nan"},
    ],
)
def test_values_without_meaning_are_refused(declared):
    with pytest.raises(LimbeckError):
        build(declared)


class Counted(TorchDispatchMode):
    """What torch is asked to compute, views left out: on a GPU, about a kernel each."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and "empty" not in str(function):
            self.asked.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("distance", ["mse", "unit_mse", "unit_sq", "cosine"])
@pytest.mark.parametrize("align", ["none", "linear(always=true)", "shared", "both(width=8)"])
@pytest.mark.parametrize("layers", ["uniform", "random(last=true)"])
def test_what_is_small_is_computed_for_all_layers_at_once(layers, align, distance):
    """Both ways, to the gradients of states and maps: no layer costs a kernel more."""

    def asked(depth):
        term = bound(Match("cls", map=layers, align=align, distance=distance), student=(depth, 8, 2, 3))
        states = {layer: draw(2, 8, seed=layer).float() for layer in range(1, 7)}
        ours = {("cls", s): one_row(states[s].requires_grad_()) for s in range(1, depth + 1)}
        theirs = {("cls", t): one_row(state.detach().bfloat16()) for t, state in states.items()}
        with Counted() as counted:
            term(ours, theirs, {}).sum().backward()
        return sorted(counted.asked)

    assert asked(2) == asked(6)


@pytest.mark.parametrize("distance", ["mse", "unit_mse", "cosine"])
@pytest.mark.parametrize("align", ["none", "linear", "linear(always=true)", "shared", "both(width=8)"])
@pytest.mark.parametrize("match", ["hidden", "cls"])
@pytest.mark.parametrize("layers", ["uniform", "random(last=true)"])
def test_half_precision_is_compared_in_full(layers, match, align, distance):
    """Whoever turns it into fp32: states on their way to an aligner, or the distance itself."""
    term = bound(Match(match, map=layers, align=align, distance=distance))
    found = []
    for take in (torch.Tensor.bfloat16, lambda states: states.bfloat16().float()):
        sides = [
            {
                (match, layer): Rows(take(draw(3, LENGTH, 8, seed=seed + layer)), MASK)
                if match == "hidden"
                else one_row(take(draw(3, 8, seed=seed + layer)))
                for layer in range(1, depth + 1)
            }
            for seed, depth in ((0, 3), (10, 6))
        ]
        found.append(term(*sides, {}))
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(*found)


class OfLists(Linear):
    """Somebody else's aligner: it maps both sides, and knows nothing but lists of fp32."""

    def forward(self, student, teacher):
        assert isinstance(student, list)
        assert isinstance(teacher, list)
        return [torch.cat([one, one], -1) for one in student], [
            m(one).repeat(1, 2) for m, one in zip(self.maps, teacher)
        ]


@pytest.mark.parametrize("match", ["cls", "mean"])
def test_an_aligner_that_takes_lists_gets_lists(match, monkeypatch):
    monkeypatch.setitem(ALIGNERS, "own", OfLists)
    term = bound(Match(match, map="uniform", align="own(always=true)", distance="mse"))
    sides = [{(match, layer): one_row(draw(3, 8, seed=layer).bfloat16()) for layer in range(1, n + 1)} for n in (3, 6)]
    assert term(*sides, {}).shape == (3,)
