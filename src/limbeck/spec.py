"""`name(option=value)` → a bound callable; a wrong name, option or value → an error that teaches.

A call string is the one way a recipe names an ingredient: `mse`, `kl(temperature=2)`, `layers([4, 8, 12])`,
`ramp(0.1)`. Values are numbers (`1/3` too), true/false, words and lists: data, never code.
"""

import ast
import importlib
import inspect
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import yaml

from limbeck.errors import LimbeckError, did_you_mean

WORDS = {"true": True, "false": False, "none": None, "null": None}
NAME = re.compile(r"[^\W\d]\w*([-.]\w+)*")  # names may have hyphens, and dots where they are paths

# What a value has to be, by the first word of the name pydantic has for a fault.
VALUES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a word",
    "list": "a list, as [a, b]",
    "dict": "a map, as {a: b}",
    "dataclass": "a map, as {a: b}",
    "too": "at least 1",
}

# Whether a recipe may name code by a dotted path; `--allow-code` sets it.
code_allowed: ContextVar[bool] = ContextVar("code_allowed", default=False)


@contextmanager
def allowing(code: bool) -> Iterator[None]:
    """Inside, recipes may name code, or may not."""
    token = code_allowed.set(code)
    try:
        yield
    finally:
        code_allowed.reset(token)


@dataclass(frozen=True)
class Call:
    """A name with options, as written in a recipe."""

    name: str
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        inside = [_show(a) for a in self.args] + [f"{k}={_show(v)}" for k, v in self.options.items()]
        return f"{self.name}({', '.join(inside)})" if inside else self.name

    def __hash__(self) -> int:
        return hash(str(self))

    def with_option(self, option: str, value: Any) -> "Call":
        """The same call with one option changed: what `--set …kl.temperature=4` does."""
        return Call(self.name, self.args, {**self.options, option: value})


def parse(text: "str | Call | int | float") -> Call:
    """Read a call string."""
    if isinstance(text, Call):
        return text
    name, bracket, inside = unicodedata.normalize("NFKC", str(text)).strip().partition("(")
    try:
        if not NAME.fullmatch(name := name.strip()):
            raise ValueError("not a name")
        if not bracket:
            return Call(name)
        node = ast.parse(f"call({inside}", mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise ValueError("more than a call")
        options = {k.arg: _value(k.value) for k in node.keywords if k.arg}
        if len(options) < len(node.keywords):
            raise ValueError("an option twice, or **")
        return Call(name, tuple(_value(a) for a in node.args), options)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise LimbeckError(
            f'"{text}" is not a call. Write a name, with options in brackets if any: "kl" or "kl(temperature=2)".'
        ) from error


def number(value: Any) -> float | int:
    """A number, or a fraction written `a/b`."""
    with suppress(ValueError, ZeroDivisionError):
        if isinstance(value, str):
            top, slash, bottom = value.partition("/")
            digits = top.strip().lstrip("-").isdigit()
            value = float(top) / float(bottom) if slash else int(top) if digits else float(top)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("a number, such as 2e-5 or 1/3")
    return value


def whole(value: Any) -> int:
    """A whole number."""
    with suppress(ValueError):
        if (found := number(value)) == int(found):
            return int(found)
    raise ValueError("a whole number")


def shares(value: Any) -> list[float]:
    """Two numbers from 0 to below 1, such as AdamW's betas."""
    with suppress(ValueError, TypeError):
        first, second = map(number, () if isinstance(value, str) else value)
        if min(first, second) >= 0 and max(first, second) < 1:
            return [first, second]
    raise ValueError("two numbers from 0 to below 1, as [0.9, 0.999]")


def literal(text: str) -> Any:
    """The value of `--set path=TEXT`: a number, or what YAML makes of it."""
    with suppress(ValueError):
        return number(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise LimbeckError(f'the value "{text}" cannot be read: quote it if it holds brackets or colons.') from error


def bind(call: Call, table: Mapping[str, Callable], kind: str) -> partial:
    """The callable a call names, with its options set; raises with what is allowed."""
    function = _lookup(call, table, kind)
    options = options_of(function)
    positional = dict(zip(options, call.args))
    if len(call.args) > len(options) or positional.keys() & call.options.keys():
        raise LimbeckError(f'{kind} "{call}": too many values. It takes {_signature(call.name, options)}.')
    chosen = {**positional, **call.options}
    for name, value in chosen.items():
        if name not in options:
            raise LimbeckError(
                f'{kind} "{call.name}" has no option "{name}".{did_you_mean(name, options)} '
                f"It takes {_signature(call.name, options)}."
            )
        chosen[name] = _fitted(call, options[name], value, kind)
    missing = [n for n, p in options.items() if p.default is inspect.Parameter.empty and n not in chosen]
    if missing:
        raise LimbeckError(f'{kind} "{call}" needs {", ".join(missing)}: write {_signature(call.name, options)}.')
    return partial(function, **chosen)


def _lookup(call: Call, table: Mapping[str, Callable], kind: str) -> Callable:
    if call.name in table:
        return table[call.name]
    if "." not in call.name:
        raise LimbeckError(
            f'there is no {kind} "{call.name}".{did_you_mean(call.name, table)} Allowed: {", ".join(sorted(table))}.'
        )
    if not code_allowed.get():
        raise LimbeckError(
            f'{kind} "{call.name}" is a path to Python code, which a recipe may only run when you say so: '
            "add --allow-code if you trust this recipe."
        )
    module, _, name = call.name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise LimbeckError(f'{kind} "{call.name}" cannot be imported: {error}.') from error


def options_of(function: Callable) -> dict[str, inspect.Parameter]:
    """An ingredient's options are its keyword-only parameters, in order."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and not p.name.startswith("_")}


def _signature(name: str, options: Mapping[str, inspect.Parameter]) -> str:
    if not options:
        return f"no options: {name}"
    empty = inspect.Parameter.empty
    shown = (n if p.default is empty else f"{n}={_show(p.default)}" for n, p in options.items())
    return f"{name}({', '.join(shown)})"


def _fitted(call: Call, parameter: inspect.Parameter, value: Any, kind: str) -> Any:
    from pydantic import TypeAdapter, ValidationError

    if parameter.annotation is inspect.Parameter.empty:
        return value
    try:
        # As a word, since pydantic would take true for the number 1.
        plain = _show(value) if isinstance(value, bool) else value
        return TypeAdapter(parameter.annotation).validate_python(plain)
    except ValidationError as error:
        wanted = " or ".join(dict.fromkeys(allowed(fault) for fault in error.errors()))
        raise LimbeckError(
            f'{kind} "{call}": {parameter.name}={_show(value)} does not fit. Allowed: {wanted}.'
        ) from error


def allowed(fault: Mapping[str, Any]) -> str:
    """What a value that pydantic found to be wrong may be, in our words."""
    said: str = fault["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    word = fault["type"].partition("_")[0]
    return f"a number {said}" if word in ("greater", "less") else VALUES.get(word, said)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):  # names may have hyphens
        return f"{_dotted(node.left)}-{_dotted(node.right)}"
    raise ValueError("not a name")


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -number(_value(node.operand))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return number(f"{_value(node.left)}/{_value(node.right)}")
    word = _dotted(node)
    return WORDS.get(word.lower(), word)


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_show, value))}]"
    return unicodedata.normalize("NFKC", value) if isinstance(value, str) else repr(value)
