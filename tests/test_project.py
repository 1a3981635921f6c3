"""The project keeps its own house: names, files, floors and what the prose promises."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from laws.laws import (
    LAYOUT,
    check_bytes,
    check_conservation,
    check_in_place,
    check_own,
    check_refuses_to_send_nonsense,
    check_untouched,
    check_zeros,
)
from support.paths import ROOT

import gossamer
from gossamer.compressors import Feedback
from gossamer.recipes.catalog import NOUNS
from gossamer.recipes.recipe import resolve

SOURCES = sorted((ROOT / "src").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAY_IMPORT_TORCH_DISTRIBUTED = {"transports", "environment", "launch", "session"}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_changelog_names_the_version() -> None:
    newest = re.search(r"^## (\S+)", read("CHANGELOG.md"), flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == gossamer.__version__


def test_public_names_are_documented() -> None:
    objects = {name: getattr(gossamer, name) for name in gossamer.__all__ if name != "__version__"}
    assert [name for name, value in objects.items() if not _own_doc(value)] == []


def _own_doc(value: object) -> str:
    """The docstring that was written, not the signature that a dataclass puts in its place."""
    doc = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
    return "" if doc is None or doc.startswith(f"{getattr(value, '__name__', '')}(") else doc


def test_own_doc_sees_through_dataclasses() -> None:
    @dataclasses.dataclass(frozen=True)
    class Bare:
        size: int = 0

    assert Bare.__doc__
    assert not _own_doc(Bare)


def test_public_names_are_sorted_and_exist() -> None:
    assert list(gossamer.__all__) == sorted(gossamer.__all__)
    assert all(hasattr(gossamer, name) for name in gossamer.__all__)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100


def test_no_file_is_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert lengths, "no sources found"
    assert {name: lines for name, lines in lengths.items() if lines > 400} == {}


# -- floors ----------------------------------------------------------------------------------------


def _imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _talks_to_torch_distributed(source: str) -> bool:
    """`import torch.distributed...`, `from torch.distributed import ...`, `from torch import distributed`."""
    return any(f"{name}.".startswith("torch.distributed.") for name in _imports(source))


@pytest.mark.parametrize(
    ("source", "talks"),
    [
        ("import torch.distributed as dist", True),
        ("from torch import distributed", True),
        ("from torch.distributed.elastic import agent", True),
        ("def late():\n    import torch.distributed", True),
        ("import torch, torch.nn.parallel", False),
        ("from torch import nn  # torch.distributed", False),
    ],
)
def test_talking_to_torch_distributed_is_seen(source: str, talks: bool) -> None:
    assert _talks_to_torch_distributed(source) is talks


def test_torch_distributed_is_imported_in_few_places() -> None:
    package = ROOT / "src" / "gossamer"
    talking = {path for path in SOURCES if _talks_to_torch_distributed(path.read_text())}
    places = {path.relative_to(package).parts[0].removesuffix(".py") for path in talking}
    assert places <= MAY_IMPORT_TORCH_DISTRIBUTED


# -- prose -----------------------------------------------------------------------------------------


def _make_targets(text: str) -> set[str]:
    return set(re.findall(r"\bmake ([a-z][a-z-]+)", text))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/design.md"])
def test_commands_in_the_prose_are_in_the_makefile(name: str) -> None:
    declared = set(re.findall(r"^([a-z-]+):", read("Makefile"), flags=re.MULTILINE))
    commands = "\n".join(re.findall(r"`[^`\n]+`|^    .*$", read(name), flags=re.MULTILINE))
    assert _make_targets(commands)
    assert _make_targets(commands) <= declared


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/design.md"])
def test_links_lead_somewhere(name: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", read(name)) if "://" not in link]
    assert [link for link in links if not (ROOT / name).parent.joinpath(link).exists()] == []


def test_recipes_in_the_readme_are_real() -> None:
    rows = re.findall(r"^\| (`.*) \|$", read("README.md"), flags=re.MULTILINE)
    terms = [term for row in rows for term in re.findall(r"`([A-Z]\w+\([^`]*\))`", row)]
    assert {term.split("(")[0] for term in terms} == set(NOUNS)
    for term in terms:
        beside = "Gossip() + " if NOUNS[term.split("(")[0]].kind == "topology" else ""
        resolve(beside + re.sub(r"\b[XY]\b", "Int8()", term))


def contributed() -> dict[str, Any]:
    code = re.search(r"```python\n(.*?)```", read("CONTRIBUTING.md"), flags=re.DOTALL)
    assert code is not None
    namespace: dict[str, Any] = {"__name__": "contributed"}
    exec(code[1], namespace)
    return namespace


def test_the_compressor_in_contributing_obeys_the_laws() -> None:
    names = contributed()
    rota = names["RoundRobin"](every=4)
    check_own(rota, 4)
    check_conservation(Feedback(rota), 3)
    check_zeros(rota, 3)
    check_untouched(Feedback(rota))
    check_in_place(Feedback(rota), 3)
    check_refuses_to_send_nonsense(rota)
    check_bytes(rota, 4, lambda world: 2 * (world - 1) * 4 * -(-LAYOUT.numel // 4) / world)
    assert eval(repr(rota), names) == rota
