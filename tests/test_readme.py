"""The README's examples run as they stand, and links of all pages lead somewhere."""

import re
from pathlib import Path

import pytest

from limbeck.data import grammar
from tests import toy

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf8")


def example(name: str) -> str:
    return re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", README, flags=re.DOTALL).group(1)


@pytest.mark.parametrize("name", ["distill", "distiller"])
def test_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    grammar.write(tmp_path, train=48, dev=16)
    toy.save(toy.model(), tmp_path / "teacher")
    code = example(name)
    assert len(code.strip().splitlines()) <= 20
    exec(compile(code, f"README.md ({name})", "exec"), {})
    printed = capsys.readouterr().out
    assert ("the student is in" if name == "distill" else "match") in printed


def test_every_recipe_is_named() -> None:
    from limbeck.recipe import shipped

    missing = [name for name in shipped() if f"`{name}`" not in README]
    assert not missing


def test_links_lead_somewhere() -> None:
    """Above all to the raw results that numbers rest on."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf8"))]
    assert len(links) > 50
    assert not [(page.name, link) for page, link in links if "://" not in link and not (page.parent / link).exists()]
