"""The tree holds what it promises: imports go one way, help is quick, public things are documented."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import limbeck
from limbeck.data.kinds import Kind

ROOT = Path(limbeck.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# A module imports, at its top, only what stands on a lower line, or beside it in its own package.
ORDER = [
    {"errors", "wide_head", "kernels", "streams"},
    {"folder", "spec", "squares", "means"},
    {"data"},
    {"mappings", "distances", "architectures", "report", "recipe", "pairs"},
    {"features", "projector", "models", "vocabulary", "views"},
    {"taps"},
    {"evaluation", "filters", "initialisers"},
    {"aligners"},
    {"blends"},
    {"objectives", "efficiency", "store"},
    {"cache"},
    {"teachers", "adaptation"},
    {"distiller"},
    {"engine", "request", "trained"},
    {"prepare"},
    {"scoring", "identity"},
    {"run", "integrations"},
    {"check", "compare", "demo", "grid"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def name_of(path):
    """The module's place in the order: its own name, or its package's."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(node, package):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        base = ".".join([*package[: len(package) - node.level + 1], base]).rstrip(".")
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def top_level_imports(path):
    """The limbeck modules a file imports as it is imported itself."""
    found = set()
    for node in _executed(ast.parse(path.read_text("utf8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = ("limbeck", *path.relative_to(ROOT).parts[:-1])
            found |= {name for name in imported(node, package) if name.split(".")[0] == "limbeck"}
    return {name.split(".")[1] for name in found if "." in name} & (set(LEVEL) | {p.stem for p in ROOT.iterdir()})


def _executed(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from _executed(child)


def test_every_module_has_its_place():
    names = {name_of(path) for path in FILES} - {"__init__"}
    assert names <= set(LEVEL), f"give {names - set(LEVEL)} a line in ORDER"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    own = name_of(path)
    for other in top_level_imports(path):
        if own == "__init__":
            assert other == "errors"  # the rest is lazy
        elif other != own:
            assert LEVEL[other] < LEVEL[own], f"{path.name} imports {other}"


@pytest.mark.parametrize("path", [p for p in FILES if name_of(p) in ("report", "data")], ids=lambda p: p.name)
def test_reports_and_data_know_nothing_of_training(path):
    """Not even inside a function."""
    package = ("limbeck", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text("utf8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            known = {name.split(".")[1] for name in imported(node, package) if name.startswith("limbeck.")}
            assert not known & {"engine", "run", "distiller", "prepare", "objectives"}, path.name


def public(tree):
    """Public functions, classes and methods, with their names; not what is inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node)


# What a subclass answers is described where it is asked for.
ANSWERS = {"forward", "bind", "reads", "at", "finish", "layer_weights", "weights", *vars(Kind)}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_public_things_are_documented(path):
    tree = ast.parse(path.read_text("utf8"))
    assert not path.read_text("utf8").strip() or ast.get_docstring(tree), f"{path.name} does not say what it is for"
    classes = {id(m): c for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for m in c.body}
    for node in public(tree):
        inherited = id(node) in classes and classes[id(node)].bases and node.name in ANSWERS
        assert inherited or ast.get_docstring(node), f"{path.name}: {node.name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_input_is_not_checked_by_assert(path):
    """python -O takes asserts away."""
    lines = [node.lineno for node in ast.walk(ast.parse(path.read_text("utf8"))) if isinstance(node, ast.Assert)]
    assert not lines, f"{path.name}: {lines}"


def begins(message):
    """How a message begins, where that is written out."""
    while isinstance(message, ast.BinOp):
        message = message.left
    if isinstance(message, ast.JoinedStr):
        message = message.values[0]
    return message.value if isinstance(message, ast.Constant) else ""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_errors_begin_alike(path):
    """A message stands behind `limbeck:`, or behind the path of a fault: it begins small, unless with a name."""
    names = ("Accelerate", "DeepSpeed", "DistillationTrainer")
    calls = [node for node in ast.walk(ast.parse(path.read_text("utf8"))) if isinstance(node, ast.Call)]
    said = [begins(call.args[0]) for call in calls if ast.unparse(call.func) == "LimbeckError" and call.args]
    assert not [one for one in said if one[:1].isupper() and not one.startswith(names)], path.name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_unpickles_or_evaluates(path):
    for node in ast.walk(ast.parse(path.read_text("utf8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert not {"pickle", "dill", "cloudpickle", "marshal", "shelve"} & set(imported(node, ("limbeck",)))
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load"), (
                f"{path.name}: {called}"
            )


def heavy_after(code, *arguments):
    """Which of the heavy packages a fresh interpreter holds after running `code`."""
    program = f"import sys, json\n{code}\nprint('\\n' + json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    paths = [str(ROOT.parent), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1]), ran.stdout


HEAVY = ["torch", "transformers", "accelerate", "datasets", "matplotlib", "sklearn"]


def test_importing_limbeck_is_light():
    assert heavy_after("import limbeck; dir(limbeck); limbeck.LimbeckError")[0] == []
    assert "torch" in heavy_after("import limbeck; limbeck.Distiller")[0]


@pytest.mark.parametrize("arguments", [["--help"], ["distill", "--help"]])
def test_help_is_light(arguments):
    code = (
        "import runpy\n"
        f"sys.argv = ['limbeck', *{arguments!r}]\n"
        "try:\n    runpy.run_module('limbeck', run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code in (0, None), end.code"
    )
    heavy, said = heavy_after(code)
    assert heavy == []
    assert "distill" in said


def test_public_names_are_there():
    for name in limbeck.__all__:
        assert getattr(limbeck, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        limbeck.nothing  # noqa: B018


def test_the_version_is_the_packages():
    text = (ROOT.parents[1] / "pyproject.toml").read_text("utf8")
    assert f'version = "{limbeck.__version__}"' in text
