"""The door of JAX: it is imported by name alone, and a library that is missing is named with the line to write."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from gossamer.integrations import library_versions


def test_gossamer_imports_no_jax() -> None:
    code = "import sys, gossamer; gossamer.engine.Session; assert not {'jax', 'optax'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_jax_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(library_versions, "version", missing)
    for name in [each for each in sys.modules if each.startswith(("gossamer.jax", "gossamer.integrations.jax"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"gossamer\[jax\]"):
        importlib.import_module("gossamer.jax")
