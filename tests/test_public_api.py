"""The public names of the package."""

from __future__ import annotations

import doctest
import inspect
import re

import pytest
from support.paths import ROOT

import gossamer
from gossamer.algorithms.recipes.catalog import NOUNS
from gossamer.errors import RecipeError


def test_every_term_of_a_recipe_is_importable_from_the_package() -> None:
    assert {name for name in NOUNS if getattr(gossamer, name, None) is not NOUNS[name]} == set()
    assert set(NOUNS) <= set(gossamer.__all__)


def test_dir_lists_the_public_names_and_nothing_else() -> None:
    public = {*gossamer.__all__, "engine", "federated", "parallel", "errors", "extend", "integrations"}
    assert set(dir(gossamer)) == public
    assert not {"algorithms", "base", "comm", "train"} & public


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


PUBLIC = re.compile(
    r"gossamer(\.(engine|errors|events|extend|parallel|federated(\.(flower|population))?|integrations(\.\w+)?))?(\.[A-Z]\w*)?"
)
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
