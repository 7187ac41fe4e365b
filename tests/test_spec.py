"""Call strings: read, written, bound; and errors that say what to type instead."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limbeck.errors import LimbeckError
from limbeck.spec import Call, bind, code_allowed, literal, number, options_of, parse

# What a stranger's module would offer, reached by a dotted path.
HERE = __name__


def kl(student, teacher, *, temperature: float = 1.0, scale: float | str = 1.0):
    """Stands in for an ingredient."""
    return student, teacher, temperature, scale


def layers(start, *, which: list[int], deep: bool = False):
    """An ingredient with an option that must be given."""
    return start, which, deep


def unannotated(student, *, power=2):
    """Written by somebody who writes no annotations."""
    return student**power


TABLE = {"kl": kl, "layers": layers}


@pytest.mark.parametrize(
    ("text", "name", "args", "options"),
    [
        ("mse", "mse", (), {}),
        ("  mse  ", "mse", (), {}),
        ("kl(temperature=2)", "kl", (), {"temperature": 2}),
        ("kl(2)", "kl", (2,), {}),
        ("kl(2, scale=0.5)", "kl", (2,), {"scale": 0.5}),
        ("ramp(1/4)", "ramp", (0.25,), {}),
        ("ramp(-1/4)", "ramp", (-0.25,), {}),
        ("f(-3)", "f", (-3,), {}),
        ("f(1e-3)", "f", (0.001,), {}),
        ("layers([4, 8, 12])", "layers", ([4, 8, 12],), {}),
        ("pairs([[1, 4], [2, 8]])", "pairs", ([[1, 4], [2, 8]],), {}),
        ("pairs([(1, 4)])", "pairs", ([[1, 4]],), {}),
        ("uniform(last=false)", "uniform", (), {"last": False}),
        ("uniform(last=True, a=none, b=null)", "uniform", (), {"last": True, "a": None, "b": None}),
        ("layers(first)", "layers", ("first",), {}),
        ("layers('first')", "layers", ("first",), {}),
        ("kl(temperature=2, scale=T²)", "kl", (), {"temperature": 2, "scale": "T2"}),
        ("att-mse", "att-mse", (), {}),
        ("hid-cls-contrast(width=128)", "hid-cls-contrast", (), {"width": 128}),
        ("package.module.function(2)", "package.module.function", (2,), {}),
        ("f()", "f", (), {}),
    ],
)
def test_a_call_is_read(text, name, args, options):
    call = parse(text)
    assert (call.name, call.args, dict(call.options)) == (name, args, options)
    assert parse(call) is call


def test_whole_numbers_stay_whole():
    assert isinstance(parse("f(2)").args[0], int)
    assert isinstance(number("2"), int)
    assert isinstance(number("-2"), int)
    assert isinstance(number("2.0"), float)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2",
        "kl(",
        "kl)",
        "1 + 2",
        "kl(lambda: 1)",
        "kl(a=[x for x in y])",
        "kl(open('x'))",
        "kl()()",
        "a; b",
        "kl(temperature=1/0)",
        "kl(-true)",
        "kl(*options)",
        "kl(**options)",
        "kl(temperature=1, temperature=2)",
        "3-kl",
        0.5,
    ],
)
def test_what_is_no_call_is_refused(text):
    with pytest.raises(LimbeckError, match="is not a call"):
        parse(text)


words = st.from_regex(r"[a-z][a-z_]{0,8}(-[a-z]{1,5})?", fullmatch=True).filter(
    lambda w: not set(w.split("-")) & {"true", "false", "none", "null", "inf", "nan"} and _plain(w)
)
plain_words = words.filter(lambda w: "-" not in w)


def _plain(word):
    import keyword

    return not any(keyword.iskeyword(part) for part in word.split("-"))


scalars = st.one_of(
    st.booleans(),
    st.none(),
    st.integers(-(10**6), 10**6),
    st.floats(allow_nan=False, allow_infinity=False),
    plain_words,
)
values = st.one_of(
    scalars, st.lists(scalars, max_size=3), st.lists(st.lists(st.integers(0, 24), max_size=2), max_size=3)
)
calls = st.builds(
    Call, words, st.lists(values, max_size=2).map(tuple), st.dictionaries(plain_words, values, max_size=3)
)


@given(calls)
def test_a_call_reads_back_as_it_is_written(call):
    again = parse(str(call))
    assert again == call
    assert hash(again) == hash(call)
    assert str(again) == str(call)


@given(calls, plain_words, scalars)
def test_one_option_changes_and_no_other(call, option, value):
    changed = parse(str(call.with_option(option, value)))
    assert changed.options == {**call.options, option: value}
    assert (changed.name, changed.args) == (call.name, call.args)


@given(st.text(max_size=30))
def test_any_text_is_a_call_or_a_taught_error(text):
    try:
        call = parse(text)
    except LimbeckError:
        return
    assert call.name


@pytest.mark.parametrize(
    ("given_", "expected"),
    [("1/3", 1 / 3), ("2", 2), ("2e-5", 2e-5), (0.5, 0.5), (3, 3), ("-1", -1), (" 7 / 2 ", 3.5)],
)
def test_numbers_and_fractions(given_, expected):
    assert number(given_) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("wrong", [True, "x", "1/x", "", None, [1], "1/0", "1/2/3"])
def test_what_is_no_number_is_a_value_error(wrong):
    with pytest.raises(ValueError, match=r".*"):
        number(wrong)


def test_the_value_of_an_override():
    assert literal("5e-5") == 5e-5
    assert literal("1/3") == 1 / 3
    assert literal("true") is True
    assert literal("null") is None
    assert literal("[layers(first), classifier(frozen=true)]") == ["layers(first)", "classifier(frozen=true)"]
    assert literal("kl(temperature=2)") == "kl(temperature=2)"
    with pytest.raises(LimbeckError, match=r"\[layers\(first"):
        literal("[layers(first")


def test_binding_sets_options_and_leaves_defaults():
    bound = bind(parse("kl(temperature=2)"), TABLE, "distance")
    assert bound("s", "t") == ("s", "t", 2.0, 1.0)
    assert isinstance(bound.keywords["temperature"], float)
    assert bind(parse("kl(2, 3)"), TABLE, "distance")("s", "t") == ("s", "t", 2.0, 3.0)
    assert bind(parse("kl"), TABLE, "distance")("s", "t") == ("s", "t", 1.0, 1.0)
    assert bind(parse("layers([1, 2], deep=true)"), TABLE, "start")("x") == ("x", [1, 2], True)


def test_options_are_the_keyword_only_parameters():
    assert list(options_of(kl)) == ["temperature", "scale"]
    assert not options_of(lambda student, teacher, *, _hidden=1: None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kll", ['there is no distance "kll"', 'Did you mean "kl"?', "Allowed: kl, layers"]),
        ("zzzz", ['there is no distance "zzzz"', "Allowed: kl, layers"]),
        (
            "kl(temprature=2)",
            ['no option "temprature"', 'Did you mean "temperature"?', "kl(temperature=1.0, scale=1.0)"],
        ),
        ("kl(1, 2, 3)", ["too many values", "kl(temperature=1.0, scale=1.0)"]),
        ("kl(1, temperature=2)", ["too many values"]),
        ("kl(temperature=hot)", ["temperature=hot does not fit. Allowed: a number."]),
        ("layers", ["needs which", "layers(which, deep=false)"]),
        ("kl(temperature=true)", ["temperature=true does not fit. Allowed: a number."]),
        ("layers(4)", ["which=4 does not fit", "list"]),
        ("layers([1], deep=7)", ["deep=7 does not fit. Allowed: true or false."]),
    ],
)
def test_a_wrong_call_teaches(text, said):
    with pytest.raises(LimbeckError) as caught:
        bind(parse(text), TABLE, "distance")
    for part in said:
        assert part in str(caught.value)
    if "Did you mean" not in "".join(said):
        assert "Did you mean" not in str(caught.value)


def test_an_ingredient_without_options_says_so():
    with pytest.raises(LimbeckError, match="no options: plain"):
        bind(parse("plain(2)"), {"plain": lambda student: student}, "distance")


@pytest.fixture
def with_code():
    token = code_allowed.set(True)
    yield
    code_allowed.reset(token)


def test_a_dotted_path_runs_no_code_unless_allowed():
    with pytest.raises(LimbeckError, match="--allow-code"):
        bind(parse(f"{HERE}.kl(2)"), TABLE, "distance")


@pytest.mark.usefixtures("with_code")
def test_a_dotted_path_reaches_a_strangers_function():
    assert bind(parse(f"{HERE}.kl(temperature=3)"), {}, "distance")("s", "t") == ("s", "t", 3.0, 1.0)
    assert bind(parse(f"{HERE}.unannotated(power=3)"), {}, "distance")(2) == 8
    with pytest.raises(LimbeckError, match='Did you mean "temperature"'):
        bind(parse(f"{HERE}.kl(temperatur=3)"), {}, "distance")


@pytest.mark.usefixtures("with_code")
@pytest.mark.parametrize("path", ["no_such_package.f", f"{HERE}.no_such_function"])
def test_a_dotted_path_that_leads_nowhere(path):
    with pytest.raises(LimbeckError, match="cannot be imported"):
        bind(parse(path), {}, "distance")


def test_fractions_inside_a_call_are_exact():
    assert math.isclose(parse("f(1/3)").args[0], 1 / 3, rel_tol=0)
