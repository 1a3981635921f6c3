"""Public names and packages: imported with their first use, and not before."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import gossamer

FIRST_USE = """
import sys, gossamer
later = ("gossamer.federated", "gossamer.parallel", "gossamer.keras", "gossamer.tensorflow")
frameworks = {"jax", "keras", "tensorflow"}
assert not any(name.startswith(later) for name in sys.modules)
assert not frameworks & set(sys.modules)
gossamer.parallel.remote, gossamer.parallel.boundary, gossamer.federated.client, gossamer.engine.Session
assert not frameworks & set(sys.modules)
"""


def test_they_are_imported_by_their_first_use() -> None:
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True)


def test_a_missing_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'gossamer' has no attribute 'paralel'"):
        _ = gossamer.paralel  # type: ignore[attr-defined]


def test_every_public_name_is_what_the_type_checker_takes_it_for() -> None:
    tree = ast.parse(Path(gossamer.__file__).read_text())
    (typed, _) = (node for node in tree.body if isinstance(node, ast.If))
    imported: dict[str, object] = {}
    for node in typed.body:
        assert isinstance(node, ast.ImportFrom)
        module = importlib.import_module(str(node.module))
        names = module.__all__ if node.names[0].name == "*" else [alias.name for alias in node.names]
        imported |= {name: getattr(module, name) for name in names}
    assert {*imported, "__version__"} == {*gossamer.__all__} <= {*dir(gossamer)}
    for name, found in imported.items():
        vars(gossamer).pop(name, None)
        assert getattr(gossamer, name) is found, name


def test_a_package_that_a_public_name_needs_and_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(place: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(gossamer, "import_module", missing)
    monkeypatch.delitem(vars(gossamer), "attach", raising=False)
    with pytest.raises(ModuleNotFoundError, match="torch"):
        _ = gossamer.attach
