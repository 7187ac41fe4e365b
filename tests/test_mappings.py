"""Which layers meet, against tables written by hand. A mapping without a table fails."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limbeck.errors import LimbeckError
from limbeck.mappings import MAPPINGS
from limbeck.spec import bind, parse

# student depth, teacher depth, options -> teacher layers, for the student layers 1, 2, … (or as given)
EXPECTED = {
    "uniform": {
        (6, 12, ""): [(1, 2), (2, 4), (3, 6), (4, 8), (5, 10), (6, 12)],
        (6, 12, "last=false"): [(1, 2), (2, 4), (3, 6), (4, 8), (5, 10)],  # PKD-Skip
        (6, 24, "last=false"): [(1, 4), (2, 8), (3, 12), (4, 16), (5, 20)],
        (6, 12, "embeddings=true"): [(0, 0), (1, 2), (2, 4), (3, 6), (4, 8), (5, 10), (6, 12)],
        (4, 12, ""): [(1, 3), (2, 6), (3, 9), (4, 12)],
        (3, 12, ""): [(1, 4), (2, 8), (3, 12)],
        (3, 6, ""): [(1, 2), (2, 4), (3, 6)],
        (5, 12, ""): [(1, 2), (2, 4), (3, 6), (4, 8), (5, 10)],  # ⌊12/5⌋ = 2: the last layer is not reached
        (12, 12, ""): [(k, k) for k in range(1, 13)],
    },
    "first": {
        (6, 12, ""): [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6)],
        (3, 6, "last=false"): [(1, 1), (2, 2)],
        (3, 6, "embeddings=true"): [(0, 0), (1, 1), (2, 2), (3, 3)],
        (5, 12, ""): [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)],
    },
    "top": {
        (6, 12, ""): [(1, 7), (2, 8), (3, 9), (4, 10), (5, 11), (6, 12)],
        (6, 12, "last=false"): [(1, 7), (2, 8), (3, 9), (4, 10), (5, 11)],  # PKD-Last
        (3, 6, ""): [(1, 4), (2, 5), (3, 6)],
        (5, 12, ""): [(1, 8), (2, 9), (3, 10), (4, 11), (5, 12)],
    },
    "last": {
        (6, 12, ""): [(6, 12)],
        (3, 24, ""): [(3, 24)],
        (4, 4, ""): [(4, 4)],
    },
    "sanh": {
        (6, 12, ""): [(1, 1), (2, 3), (3, 5), (4, 8), (5, 10), (6, 12)],  # DistilBERT
        (3, 6, ""): [(1, 1), (2, 4), (3, 6)],
        (2, 4, ""): [(1, 1), (2, 4)],
        (12, 24, ""): [(k, 2 * k - 1) for k in range(1, 7)] + [(k, 2 * k) for k in range(7, 13)],
        (4, 12, ""): [(1, 3), (2, 6), (3, 9), (4, 12)],  # otherwise uniform
        (6, 24, ""): [(1, 4), (2, 8), (3, 12), (4, 16), (5, 20), (6, 24)],
        (5, 12, ""): [(1, 2), (2, 4), (3, 6), (4, 8), (5, 10)],
        (12, 12, ""): [(k, k) for k in range(1, 13)],
    },
    "pairs": {
        (3, 12, "[[1, 4], [2, 8], [3, 12]]"): [(1, 4), (2, 8), (3, 12)],
        (3, 12, "[[0, 0], [3, 12], [3, 1]]"): [(0, 0), (3, 12), (3, 1)],
    },
    "random": {},  # below
    "lowest": {
        (6, 12, ""): [(1, 1), (2, 3), (3, 5), (4, 7), (5, 9), (6, 11)],  # CoDIR
        (3, 12, ""): [(1, 1), (2, 5), (3, 9)],
        (4, 4, ""): [(k, k) for k in range(1, 5)],
    },
    "groups": {},  # below
}


def mapped(name, student, teacher, options=""):
    return bind(parse(f"{name}({options})"), MAPPINGS, "map")(student, teacher)


def test_every_mapping_is_expected():
    assert set(EXPECTED) == set(MAPPINGS)


@pytest.mark.parametrize(
    ("name", "case", "expected"), [(n, case, e) for n, table in EXPECTED.items() for case, e in table.items()]
)
def test_the_layers_that_meet(name, case, expected):
    layers = mapped(name, *case)
    assert list(zip(layers.student, layers.teacher)) == expected
    assert len(layers.student) == len(layers.teacher)
    assert layers.draw is None


def test_layers_that_uniform_leaves_out_are_said():
    """Where the last layers meet and the depths do not divide: the teacher's top is then not followed."""
    assert "12 is no multiple of 5" in mapped("uniform", 5, 12).note
    assert "above 10" in mapped("uniform", 5, 12).note
    assert [mapped("uniform", *case).note for case in ((6, 12), (5, 12, "last=false"), (12, 12))] == [""] * 3
    made, even = mapped("sanh", 5, 12).note.split("; ")  # both of what it says
    assert (made[:12], even) == ("sanh is made", mapped("uniform", 5, 12).note)
    assert ";" not in mapped("sanh", 4, 12).note
    assert mapped("sanh", 6, 12).note == ""


@pytest.mark.parametrize("pair", ["[4, 1]", "[-1, 1]", "[1, 13]", "[1, -1]"])
def test_pairs_out_of_range_name_the_pair_and_the_range(pair):
    with pytest.raises(LimbeckError, match=r"out of range.*0 to 3.*0 to 12") as caught:
        mapped("pairs", 3, 12, f"[[1, 1], {pair}]")
    assert pair in str(caught.value)


@pytest.mark.parametrize("written", ["", "[1, 2]", "[[1, 2, 3]]", "[[1]]", "4", "[[a, b]]"])
def test_pairs_that_are_none(written):
    with pytest.raises(LimbeckError, match=r"needs layers|does not fit"):
        mapped("pairs", 3, 12, written)


depths = st.integers(1, 12).flatmap(lambda s: st.tuples(st.just(s), st.integers(s, 24)))
moments = st.tuples(st.integers(0, 2**32), st.integers(0, 3), st.integers(0, 100))


@given(depths, moments, st.booleans())
def test_random_draws_are_sorted_distinct_and_within_reach(depth, moment, last):
    layers = mapped("random", *depth, f"last={str(last).lower()}")
    student, teacher = depth
    assert layers.student == tuple(range(1, student + last))
    assert layers.teacher == tuple(range(1, teacher + last))
    drawn = [layers.teacher[i] for i in layers.draw(*moment)]
    assert len(drawn) == len(layers.student)
    assert drawn == sorted(set(drawn))
    assert all(1 <= layer <= teacher - (not last) for layer in drawn)


@given(depths, moments)
def test_a_random_draw_is_a_function_of_seed_stage_and_epoch(depth, moment):
    import random

    one = mapped("random", *depth).draw(*moment)
    random.seed(1)
    random.random()
    assert mapped("random", *depth).draw(*moment) == one


def test_random_leaves_the_last_layers_out_unless_told():
    assert mapped("random", 6, 12).teacher == tuple(range(1, 12))
    assert mapped("random", 6, 12).student == tuple(range(1, 6))


def test_random_reaches_every_layer_over_the_epochs_and_depends_on_each_argument():
    draw = mapped("random", 6, 12).draw
    draws = [tuple(draw(0, 0, epoch)) for epoch in range(40)]
    assert {i for drawn in draws for i in drawn} == set(range(11))
    assert len(set(draws)) > 20
    assert any(draw(0, 0, e) != draw(1, 0, e) for e in range(5))
    assert any(draw(0, 0, e) != draw(0, 1, e) for e in range(5))


def test_random_draws_every_layer_about_equally():
    draw = mapped("random", 6, 12).draw
    counts = [0] * 11
    for epoch in range(2200):
        for i in draw(7, 0, epoch):
            counts[i] += 1
    assert all(850 < count < 1150 for count in counts)  # 1000 expected, five standard deviations are 120


def test_random_draws_stay_the_same_across_versions():
    draw = mapped("random", 6, 12).draw
    assert [draw(42, 0, epoch) for epoch in range(3)] == [
        [1, 4, 6, 8, 9],
        [1, 2, 7, 8, 10],
        [1, 2, 3, 7, 9],
    ]


GROUPS = {
    (2, 6, "regular"): [(1, 2, 3), (4, 5, 6)],  # these four as CKD shows them
    (2, 6, "overlap"): [(1, 2, 3, 4), (3, 4, 5, 6)],
    (2, 6, "skip"): [(1, 2), (5, 6)],
    (2, 6, "cross"): [(1, 3), (4, 6)],
    (2, 6, ""): [(1, 2, 3, 4, 5, 6)] * 2,
    (3, 6, "last=false"): [(1, 2, 3, 4, 5)] * 2,
    (2, 3, "embeddings=true"): [(0, 1, 2, 3)] * 3,
    (4, 12, "regular"): [(1, 2, 3), (4, 5, 6), (7, 8, 9), (10, 11, 12)],
    (4, 12, "overlap"): [(1, 2, 3, 4), (3, 4, 5, 6, 7), (6, 7, 8, 9, 10), (9, 10, 11, 12)],
    (4, 12, "skip"): [(1, 2), (4, 5), (8, 9), (11, 12)],
    (4, 12, "cross"): [(1, 3), (4, 6), (7, 9), (10, 12)],
    (3, 6, "skip"): [(1,), (4,), (6,)],  # DistilBERT's, where the teacher is twice as deep
    (6, 12, "regular, last=false"): [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10, 11)],
    (4, 4, "skip"): [(1,), (2,), (3,), (4,)],  # nothing is left out of a share of one
}


@pytest.mark.parametrize(("case", "expected"), GROUPS.items())
def test_groups(case, expected):
    layers = mapped("groups", *case)
    assert list(layers.groups) == expected
    assert len(layers.student) == len(layers.groups)
    assert layers.teacher == tuple(sorted({t for group in expected for t in group}))
    assert layers.draw is None


@given(depths)
def test_regular_groups_share_every_layer_once(depth):
    groups = mapped("groups", *depth, "regular").groups
    assert [t for group in groups for t in group] == list(range(1, depth[1] + 1))
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


@pytest.mark.parametrize("name", ["uniform", "first", "top", "sanh", "random", "lowest", "groups"])
def test_a_student_deeper_than_its_teacher_has_to_say_which_layers_meet(name):
    with pytest.raises(LimbeckError, match=r"6 layers and the teacher 5.*pairs"):
        mapped(name, 6, 5)
    assert mapped("last", 6, 5).teacher == (5,)
