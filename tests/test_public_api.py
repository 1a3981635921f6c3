"""The public names of the package."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import json
import re

import pytest
from support.paths import ROOT

import gossamer
from gossamer.algorithms.recipes.catalog import NOUNS
from gossamer.errors import RecipeError


def test_every_term_of_a_recipe_is_importable_from_the_package() -> None:
    assert {name for name in NOUNS if getattr(gossamer, name, None) is not NOUNS[name]} == set()
    assert set(NOUNS) <= set(gossamer.__all__)


# -- the frozen list ---------------------------------------------------------------------------------------------------

FROZEN: dict[str, list[str]] = json.loads((ROOT / "tests" / "public_api.json").read_text())
MODULES = [name for name in FROZEN if name.rpartition(".")[2].islower()]


def exported(source: str) -> list[str]:
    """The literal `__all__` of a module, without importing what the module needs."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and [ast.unparse(each) for each in node.targets] == ["__all__"]:
            return sorted(ast.literal_eval(node.value))
    raise AssertionError("a public module has no literal __all__")


def names_of(place: str) -> list[str]:
    """The public names of a module or class."""
    if place == "gossamer":
        return sorted(dir(gossamer))
    if place not in MODULES:
        return sorted(name for name in dir(getattr(gossamer, place.removeprefix("gossamer."))) if name[0] != "_")
    path = ROOT / "src" / place.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return exported(file.read_text())


@pytest.mark.parametrize("place", FROZEN)
def test_public_names_change_deliberately_only(place: str) -> None:
    """Edit tests/public_api.json, CHANGELOG.md and docs/reference/api.md with a change of the public API."""
    assert names_of(place) == FROZEN[place]


def test_a_module_without_a_literal_list_is_seen() -> None:
    assert exported('__all__ = ["b", "a"]') == ["a", "b"]
    for source in ("", "__all__ = [*others]"):
        with pytest.raises((AssertionError, ValueError)):
            exported(source)


PACKAGES = ["engine", "errors", "events", "extend", "parallel", "federated", "federated.population"]
PACKAGES += ["horovod", "horovod.torch", "horovod.torch.elastic"]


@pytest.mark.parametrize("place", PACKAGES)
def test_every_listed_name_exists(place: str) -> None:
    module = importlib.import_module(f"gossamer.{place}")
    assert [name for name in FROZEN[f"gossamer.{place}"] if not hasattr(module, name)] == []


def test_the_page_lists_every_public_module_and_no_other() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    assert re.findall(r"^\| `(gossamer[\w.]*)` \|", page, re.MULTILINE) == MODULES


def test_dir_hides_internal_modules() -> None:
    assert not {"algorithms", "base", "comm", "train", "world", "version"} & set(dir(gossamer))


def test_a_recipe_from_text_equals_the_same_terms_in_python() -> None:
    written = gossamer.DiLoCo(period=20) + gossamer.Float4()
    assert gossamer.recipe("DiLoCo(period=20) + Float4()") == written
    assert gossamer.recipe(repr(written)) == written


@pytest.mark.parametrize("field", ["strategy", "compressor", "topology"])
def test_a_recipe_of_another_type_is_refused(field: str) -> None:
    with pytest.raises(RecipeError, match=f"{field} of Recipe must be a"):
        gossamer.Recipe(**{field: "TopK(0.01"})
    with pytest.raises(RecipeError, match=f"{field} of Recipe must be a"):
        gossamer.Recipe(**{field: gossamer.Median()})


PUBLIC = re.compile(rf"({'|'.join(map(re.escape, MODULES))})(\.[A-Z]\w*)?")
IMPORT = re.compile(r"^ *(?:from (gossamer[\w.]*) import|import (gossamer[\w.]*))", re.MULTILINE)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def internal_imports(text: str) -> set[str]:
    """The modules that a text imports and that are not public."""
    found = {first or second for first, second in IMPORT.findall(text)}
    return {name for name in found if not PUBLIC.fullmatch(name)}


def test_an_import_of_an_internal_module_is_seen() -> None:
    text = "import gossamer\nfrom gossamer.comm.mesh import x\n  from gossamer.federated.flower import TcpGrid"
    assert internal_imports(text) == {"gossamer.comm.mesh"}


def test_pages_and_examples_import_public_modules_only() -> None:
    examples = [path for path in sorted((ROOT / "examples").rglob("*.py")) if path.name != "demo.py"]
    found = {path.name: internal_imports(path.read_text()) for path in [*PAGES, *examples]}
    assert {name: modules for name, modules in found.items() if modules} == {}


PYTHON = re.compile(r"^ *```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
ATTRIBUTE = re.compile(r"(?<![\w.])gossamer\.([A-Za-z]\w*)")


def unknown_names(code: str) -> set[str]:
    """The names of `gossamer` and its public modules that a text of Python uses and that are not public."""
    found = {f"gossamer.{name}" for name in ATTRIBUTE.findall(code) if name not in FROZEN["gossamer"]}
    for module, several, one in re.findall(
        r"^ *from (gossamer[\w.]*) import (?:\(([^)]*)\)|([^\n(]+))", code, re.MULTILINE
    ):
        names = [each.split(" as ")[0].strip() for each in (several or one).split("#")[0].split(",")]
        found |= {f"{module}.{name}" for name in names if name and name not in FROZEN.get(module, [name])}
    return found


def test_a_name_that_is_not_public_is_seen() -> None:
    code = "from gossamer import TopK, Grad\nfrom gossamer.errors import require as check\nx.gossamer.y, gossamer.hop()"
    assert unknown_names(code) == {"gossamer.Grad", "gossamer.errors.require", "gossamer.hop"}


def test_pages_and_notebooks_use_public_names_only() -> None:
    found = {path.name: unknown_names("\n".join(PYTHON.findall(path.read_text()))) for path in PAGES}
    for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        code = "\n".join("".join(cell["source"]) for cell in cells)
        found[path.name] = unknown_names(code) | internal_imports(code)
    assert {name: names for name, names in found.items() if names} == {}


def test_options_of_attach_are_given_by_name() -> None:
    parameters = inspect.signature(gossamer.attach).parameters.values()
    positional = [each.name for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == ["model", "optimizer", "recipe"]


@pytest.mark.parametrize("name", [n for n in gossamer.__all__ if ">>>" in (getattr(gossamer, n).__doc__ or "")])
def test_examples_in_docstrings_print_what_they_show(name: str) -> None:
    known = dict(NOUNS)
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    try:
        for test in finder.find(getattr(gossamer, name), name, globs={"gossamer": gossamer}):
            runner.run(test)
    finally:
        NOUNS.clear()
        NOUNS.update(known)
    assert runner.tries > 0
    assert runner.failures == 0
