"""The public names of the package."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import json
import re
import textwrap
from pathlib import Path
from types import GenericAlias

import pytest
import torch
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
    """`__all__` of a module, a literal list and those of modules added to it, without importing what they need."""
    body = ast.parse(source).body
    names: list[str] | None = None
    for node in body:
        if isinstance(node, ast.Assign) and [ast.unparse(each) for each in node.targets] == ["__all__"]:
            names = list(ast.literal_eval(node.value))
        elif names is not None and isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "__all__":
            name = ast.unparse(node.value).removesuffix(".__all__")
            (package,) = (
                each.module
                for each in body
                if isinstance(each, ast.ImportFrom) and each.module and name in [alias.name for alias in each.names]
            )
            names += exported(source_of(f"{package}.{name}"))
    assert names is not None, "a public module has no literal __all__"
    return sorted(names)


def source_of(module: str) -> str:
    path = ROOT / "src" / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def names_of(place: str) -> list[str]:
    """The public names of a module or class."""
    if place == "gossamer":
        return sorted(dir(gossamer))
    if place not in MODULES:
        return sorted(name for name in dir(getattr(gossamer, place.removeprefix("gossamer."))) if name[0] != "_")
    return exported(source_of(place))


@pytest.mark.parametrize("place", FROZEN)
def test_public_names_change_deliberately_only(place: str) -> None:
    """Edit tests/public_api.json, CHANGELOG.md and docs/reference/api.md with a change of the public API."""
    assert names_of(place) == FROZEN[place]


def test_a_module_without_a_literal_list_is_seen() -> None:
    assert exported('__all__ = ["b", "a"]') == ["a", "b"]
    added = 'from gossamer.horovod import basics\n__all__ = ["a"]\n__all__ += basics.__all__'
    assert exported(added) == sorted(["a", *exported(source_of("gossamer.horovod.basics"))]) != ["a"]
    for source in ("", "__all__ = [*others]"):
        with pytest.raises((AssertionError, ValueError)):
            exported(source)


PACKAGES = ["engine", "errors", "events", "extend", "parallel", "federated", "federated.population"]
PACKAGES += ["horovod", "horovod.torch", "horovod.torch.elastic"]
FRAMEWORKS = {"jax", "keras", "tensorflow"}


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


def documented() -> dict[str, object]:
    """The public objects of the library that no other framework is needed for, by name."""
    found: dict[str, object] = {name: getattr(gossamer, name) for name in gossamer.__all__ if name not in FRAMEWORKS}
    for place in [each for each in PACKAGES if not each.startswith("horovod")]:
        module = importlib.import_module(f"gossamer.{place}")
        found |= {f"{place}.{name}": getattr(module, name) for name in FROZEN[f"gossamer.{place}"]}
    for holder in (gossamer.World, gossamer.Session):
        found |= {f"{holder.__name__}.{name}": inspect.getattr_static(holder, name) for name in dir(holder)}
    return {name: each for name, each in found.items() if ">>>" in (each.__doc__ or "")}


@pytest.mark.parametrize("name", documented())
def test_examples_in_docstrings_print_what_they_show(name: str, tmp_path: Path) -> None:
    """Examples may use a model and an optimizer, their session, batches of inputs and a directory by these names."""
    known = dict(NOUNS)
    model, batch = torch.nn.Linear(2, 1), torch.ones(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    session = gossamer.attach(model, optimizer, "TopK(0.5)")
    names = {"gossamer": gossamer, "torch": torch, "model": model, "optimizer": optimizer, "session": session}
    names |= {"scheduler": scheduler, "batch": batch, "loader": [batch], "directory": tmp_path}
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    try:
        for test in finder.find(documented()[name], name, globs=names):
            runner.run(test)
    finally:
        session.close()
        NOUNS.clear()
        NOUNS.update(known)
    assert runner.tries > 0
    assert runner.failures == 0


# Users do not construct them: gossamer.init, gossamer.attach and parallel.remote return them.
RETURNED = {"World", "Session", "parallel.RemoteModule", "parallel.RemoteOptimizer"}
SECTION = re.compile(
    r"^ *(?:Args|Attributes):\n((?: +.*\n?|\n)+?)(?=^ *(?:Returns|Raises|Example|Yields):|\Z)", re.MULTILINE
)
NAMED = re.compile(r"^ *((?:\w+, )*\w+):", re.MULTILINE)


def undocumented(found: object) -> set[str]:
    """The parameters of a function or class that its docstring does not list, unless it names another that has them."""
    text = inspect.getdoc(found) or ""
    if not callable(found) or isinstance(found, GenericAlias) or re.search(r"\bAs `\w+`", text):
        return set()
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:  # of a type without Python code
        return set()
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    names = {each.name for each in parameters if each.kind not in variadic and each.name[0] != "_"}
    listed = {
        name
        for section in SECTION.findall(text.replace("`", ""))
        for each in NAMED.findall(section)
        for name in each.split(", ")
    }
    return names - listed - {"moment"}  # which every event has


def test_an_undocumented_parameter_is_seen() -> None:
    def reduce(tensor: int, op: int, scale: int, *others: int) -> None:
        """Reduce.

        Args:
            tensor, op: the inputs.
        """

    assert undocumented(reduce) == {"scale"}


@pytest.mark.parametrize("place", ["", *PACKAGES])
def test_docstrings_list_every_parameter(place: str) -> None:
    module = importlib.import_module(f"gossamer.{place}".rstrip("."))
    names = [name for name in FROZEN[module.__name__] if name not in FRAMEWORKS]
    public = {f"{place}.{name}".lstrip("."): getattr(module, name) for name in names}
    found = {name: undocumented(each) for name, each in public.items() if name not in RETURNED}
    assert {name: missing for name, missing in found.items() if missing} == {}


EXAMPLE = re.compile(r"^Example:\n((?: {4}.*\n?|\n)+)", re.MULTILINE)


def test_examples_that_are_not_run_are_python_with_public_names() -> None:
    """Examples without a prompt need other processes, a device mesh or other frameworks."""
    found: list[str] = []
    texts = (path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    for text in (text for text in texts if "Example:" in text):
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ClassDef | ast.FunctionDef)]
        found += [
            code for node in nodes for code in EXAMPLE.findall(ast.get_docstring(node) or "") if ">>>" not in code
        ]
    assert found
    for code in map(textwrap.dedent, found):
        compile(code, code.strip(), "exec")
        assert unknown_names(code) == set()
