"""A recipe: how the student starts, then stages in order. Plain data, from YAML, checked before a weight is loaded.

Order of precedence: the file, then its variant (`pkd:last`), then its values for the task, then `--set`. A variant may
have values for tasks of its own, which stand in place of the file's.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from limbeck.errors import LimbeckError, did_you_mean
from limbeck.spec import allowed, bind, literal, number, parse, shares, whole

FORBID = ConfigDict(extra="forbid")
Positive = Annotated[float, BeforeValidator(number), Field(gt=0)]
Count = Annotated[int, BeforeValidator(whole), Field(gt=0)]
Some = TypeVar("Some", dict, list)


@dataclass(frozen=True)
class Stage:
    """A weighted sum of objectives, minimised for some epochs or steps."""

    __pydantic_config__ = FORBID

    name: str
    objectives: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    epochs: Positive | None = None
    steps: Count | None = None
    batch: Count = 32
    lr: Positive = 2e-5
    warmup: Annotated[float, BeforeValidator(number), Field(ge=0, le=1)] = 0.1
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    weight_decay: Annotated[float, BeforeValidator(number), Field(ge=0)] = 0.01
    clip: Annotated[float, BeforeValidator(number), Field(ge=0)] = 1.0  # 0: no clipping
    betas: Annotated[list[float], BeforeValidator(shares)] = field(default_factory=lambda: [0.9, 0.999])  # AdamW's
    eps: Positive = 1e-8  # AdamW's
    mixup: str | None = None  # how examples are mixed: beta(1.0)
    data: str | None = None  # inputs other than the run's own: a task, or a file
    train: list[str] = field(default_factory=lambda: ["student", "aligners"])
    keep: Literal["best", "last"] | None = None
    patience: Count | None = None


@dataclass(frozen=True)
class Recipe:
    """One method, resolved: nothing left to look up."""

    __pydantic_config__ = FORBID

    name: str
    stages: Annotated[list[Stage], Field(min_length=1)]
    about: str = ""
    init: list[str] = field(default_factory=lambda: ["layers(first)"])
    aligners: dict[str, str] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As YAML has it, without what is unset."""
        return _without_unset(asdict(self))


def shipped() -> list[str]:
    """The names of the recipes that come with limbeck."""
    folder = resources.files("limbeck") / "recipes"
    return sorted(path.name.removesuffix(".yaml") for path in folder.iterdir() if path.name.endswith(".yaml"))


def card(name: str) -> str | None:
    """A recipe's card, as Markdown."""
    path = resources.files("limbeck") / "cards" / f"{name}.md"
    return path.read_text("utf8") if path.is_file() else None


def listed() -> list[dict[str, Any]]:
    """What there is to choose from: name, about, variants and values by task of every shipped recipe."""
    empty = {"about": "", "variants": {}, "tasks": {}}
    found = [{**empty, **read(name)} for name in shipped()]
    return [{key: one[key] for key in ("name", *empty)} for one in found]


def described(name: str) -> dict[str, Any]:
    """All about one recipe, or one of its variants: its card, and itself as YAML, with its values for tasks."""
    base, _, variant = name.partition(":")
    tasks = _varied(base, variant).get("tasks")
    values = yaml.safe_dump({"tasks": tasks}, sort_keys=False, allow_unicode=True, width=110) if tasks else ""
    return {**read(base), "card": card(base) or "", "yaml": save(resolve(name)) + values}


def read(name: str) -> dict[str, Any]:
    """The YAML of a shipped recipe or of a file, as it stands."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise LimbeckError(f'there is no recipe file "{name}". Give a file, or one of: {", ".join(shipped())}.')
        try:
            text = path.read_text("utf8")
        except (OSError, UnicodeDecodeError) as error:
            raise LimbeckError(f'recipe file "{name}" cannot be read as text: {error}') from error
    elif name in shipped():
        text = (resources.files("limbeck") / "recipes" / f"{name}.yaml").read_text("utf8")
    else:
        raise LimbeckError(
            f'there is no recipe "{name}".{did_you_mean(name, shipped())} Shipped: {", ".join(shipped())}. '
            "A recipe of your own is a path ending in .yaml; `limbeck recipes` shows what each one does."
        )
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise LimbeckError(f'recipe "{name}" is not valid YAML: {error}') from error
    if not isinstance(data, dict):
        raise LimbeckError(f'recipe "{name}" holds no mapping: it starts with "name:", "init:" and "stages:".')
    return _apart(data)


def resolve(name: str, *, task: str | None = None, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe `name`, `name:variant` or a file, with the task's values and `path=value` overrides applied."""
    base, _, variant = name.partition(":")
    data = _varied(base, variant)
    tasks = data.pop("tasks", None) or {}
    _check_changes(base, "tasks", tasks)
    changes = list(tasks.get(task or "", {}).items())
    for override in overrides:
        path, equals, value = override.partition("=")
        if not equals:
            raise LimbeckError(f'--set "{override}" has no "=": write path=value, e.g. stages.distil.lr=5e-5.')
        changes.append((path.strip(), literal(value)))
    for path, value in changes:
        _set(data, path, value)
    if variant:
        data["name"] = f"{data.get('name', base)}:{variant}"
    return validate(data)


def _varied(base: str, variant: str) -> dict[str, Any]:
    """A recipe as its file has it, with the changes of a variant, if one is named."""
    data = read(base)
    variants = data.pop("variants", None) or {}
    _check_changes(base, "variants", variants)
    if variant and variant not in variants:
        raise LimbeckError(
            f'recipe "{base}" has no variant "{variant}".{did_you_mean(variant, variants)} '
            f"Variants: {', '.join(variants) or 'none'}."
        )
    for path, value in variants.get(variant, {}).items():
        _set(data, path, value)
    return data


def _check_changes(base: str, key: str, changes: Any) -> None:
    if not isinstance(changes, dict) or not all(isinstance(change, dict) for change in changes.values()):
        raise LimbeckError(f'{key} of recipe "{base}" is not a map of names to changes, each a path and its value.')


def task_values(name: str, task: str | None) -> dict[str, Any]:
    """What a recipe, or one of its variants, sets by itself for a task."""
    base, _, variant = name.partition(":")
    return (_varied(base, variant).get("tasks") or {}).get(task or "", {})


def variant_values(name: str, task: str | None) -> list[tuple[str, Any, Any]]:
    """What a variant changes of the plain recipe: path, was, is."""
    plain = resolve(name.partition(":")[0], task=task).plain()
    return [change for change in differences(plain, resolve(name, task=task).plain()) if change[0] != "name"]


def variant_tasks(name: str) -> list[str]:
    """The tasks for which a variant has values of its own."""
    base, _, variant = name.partition(":")
    own, plain = (_varied(base, one).get("tasks") or {} for one in (variant, ""))
    return [task for task in own if own[task] != plain.get(task)]


def differences(before: Any, now: Any, path: str = "") -> Iterable[tuple[str, Any, Any]]:
    """Where two pieces of plain data differ: path, was, is. Stages go by name, as in `--set`."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from differences(before.get(key), now.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, (old, new) in enumerate(zip(before, now)):
            name = old.get("name", i) if isinstance(old, dict) else i
            yield from differences(old, new, f"{path}.{name}")
    elif before != now:
        yield path, before, now


def validate(data: Mapping[str, Any]) -> Recipe:
    """Check everything that can be checked without the models, and report every fault at once."""
    faults: list[str] = []
    recipe = None
    try:
        recipe = TypeAdapter(Recipe).validate_python(dict(data))
    except ValidationError as error:
        faults += [_fault(data, dict(e)) for e in error.errors()]
    faults += list(_call_faults(data))
    if faults or recipe is None:
        name = data.get("name", "without a name")
        count = "a fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise LimbeckError(f'recipe "{name}" has {count}:\n' + "\n".join(f"  {fault}" for fault in faults))
    return recipe


def save(recipe: Recipe) -> str:
    """The recipe as YAML that `resolve` reads back."""
    return yaml.safe_dump(recipe.plain(), sort_keys=False, allow_unicode=True, width=110)


def _call_faults(data: Mapping[str, Any]) -> Iterator[str]:
    """What pydantic does not see: names that nothing has, options that do not fit, keys that exclude each other."""
    from limbeck.aligners import ALIGNERS
    from limbeck.initialisers import INITIALISERS

    aligners = _only(dict, data.get("aligners"))
    for name, call in aligners.items():
        yield from _raised(f"aligners.{name}", _bind, call, ALIGNERS, "aligner")
    for call in _only(list, data.get("init")):
        yield from _raised("init", _bind, call, INITIALISERS, "start")
    stages = [stage for stage in _only(list, data.get("stages")) if isinstance(stage, dict)]
    names = [stage.get("name") for stage in stages]
    for name in sorted({str(name) for name in names if names.count(name) > 1}):
        yield f'stages: two are named "{name}". Names must differ, since --set goes by them.'
    for stage in stages:
        yield from _stage_faults(f"stages.{stage.get('name', '?')}", stage, aligners)


def _stage_faults(at: str, stage: Mapping[str, Any], aligners: Mapping[str, Any]) -> Iterator[str]:
    from limbeck.data.mixing import MIXUPS
    from limbeck.objectives import check_name

    if (stage.get("epochs") is None) == (stage.get("steps") is None):
        yield f"{at}: give either epochs or steps."
    if (mixup := stage.get("mixup")) is not None:
        yield from _raised(f"{at}.mixup", _bind, mixup, MIXUPS, "mixup")
        if stage.get("batch") == 1:
            yield f"{at}.mixup: the examples of a batch are mixed with each other, and a batch is 1."
    sides = [f"{name}{side}" for name in aligners for side in ("", ".student", ".teacher")]
    targets = ["student", "aligners", *sides]
    for target in _only(list, stage.get("train")):
        if target not in targets:
            yield f'{at}.train: there is no "{target}" to train. Allowed: {", ".join(targets)}.'
    for name, declared in _only(dict, stage.get("objectives")).items():
        if isinstance(declared, dict):
            yield from _raised(f"{at}.objectives.{name}", check_name, str(name))
            yield from _raised(f"{at}.objectives.{name}", _check_term, declared, aligners, mixup is not None)


def _raised(path: str, check: Callable[..., object], *given: Any) -> Iterator[str]:
    """The fault at `path` that a check raises, if it does."""
    try:
        check(*given)
    except LimbeckError as error:
        yield f"{path}: {error}"


def _bind(call: Any, table: Mapping[str, Callable], kind: str) -> None:
    bind(parse(call), table, kind)


def _check_term(declared: Mapping[str, Any], aligners: Mapping[str, Any], mixed: bool) -> None:
    from limbeck.objectives import build, check_inputs

    check_inputs(build(declared, aligners), mixed)


def _only(type_: type[Some], value: Any) -> Some:
    """A value that has that type, or an empty one: that it has another, pydantic says."""
    return value if isinstance(value, type_) else type_()


def _fault(data: Mapping[str, Any], error: dict[str, Any]) -> str:
    """One of pydantic's findings, in our words: where, what, what is allowed."""
    path = [str(part) for part in error["loc"]]
    fields = Stage.__dataclass_fields__ if path[0] == "stages" else Recipe.__dataclass_fields__
    if path[0] == "stages" and len(path) > 1 and path[1].isdigit():
        stage = data["stages"][int(path[1])]
        path[1] = str(stage.get("name", path[1])) if isinstance(stage, dict) else path[1]
    where = ".".join(path)
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        if len(path) == 1 and where in Stage.__dataclass_fields__:
            return f"{where}: belongs to a stage. Say stages.*.{where}, or name the stage instead of *."
        return f"{where}: there is no such key.{did_you_mean(path[-1], fields)} Allowed: {', '.join(fields)}."
    if error["type"] in ("missing", "missing_argument"):
        return f"{where}: is missing."
    return f"{where}: {error['input']!r} does not fit. Allowed: {allowed(error)}."


def _apart(node: Any) -> Any:
    """A copy in which nothing is one object twice, as what YAML's anchors name is: changing one would change both."""
    if isinstance(node, dict):
        return {key: _apart(value) for key, value in node.items()}
    return [_apart(item) for item in node] if isinstance(node, list) else node


def _set(data: dict[str, Any], path: str, value: Any) -> None:
    """Change one value by its path; stages go by name, `*` is every one, and a call's options go by theirs."""
    _change(data, path.split("."), value, path)


def _change(node: Any, keys: list[str], value: Any, path: str) -> None:
    key, *rest = keys
    for place in _places(node, key, path, new=not rest):
        if not rest:
            if isinstance(node, dict):
                node.pop({"steps": "epochs", "epochs": "steps"}.get(key), None)  # a stage has one or the other
            node[place] = copy.deepcopy(value)
        elif isinstance(node[place], str | int | float) and len(rest) == 1:
            node[place] = str(parse(node[place]).with_option(rest[0], value))
        else:
            _change(node[place], rest, value, path)


def _places(node: Any, key: str, path: str, *, new: bool) -> list[Any]:
    """Where a part of a path leads, in a map or a list; `new` ones may be added to a map."""
    if isinstance(node, dict):
        places, names = {str(name): name for name in node}, [str(name) for name in node]
    elif isinstance(node, list):
        named = {str(item["name"]): i for i, item in enumerate(node) if isinstance(item, dict) and "name" in item}
        places = {**{str(i): i for i in range(len(node))}, **named}
        names = list(named or places)
    else:
        raise LimbeckError(f'"{path}" leads nowhere: "{key}" stands below a plain value.')
    if key == "*":
        return list(node if isinstance(node, dict) else range(len(node)))
    if key in places:
        return [places[key]]
    if new and isinstance(node, dict):
        return [key]
    raise LimbeckError(f'"{path}": there is no "{key}".{did_you_mean(key, names)} There: {", ".join(names)}.')


def _without_unset(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_unset(value) for key, value in node.items() if value is not None}
    return [_without_unset(item) for item in node] if isinstance(node, list) else node
