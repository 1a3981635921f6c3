"""Installed: who lacks Flower, or has one too old, hears what to write."""

from __future__ import annotations

import ast
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from gossamer.federated import flower
from gossamer.federated.flower import records as installed
from gossamer.federated.flower.records import FlowerMissing, need_flower, parsed


def test_without_flower_the_line_to_write_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installed, "version", missing)
    with pytest.raises(FlowerMissing, match=r"gossamer\[flower\]"):
        need_flower()
    with pytest.raises(FlowerMissing):
        flower.compression_mod("TopK(0.1)")
    for name in ("CompressedStrategy", "VirtualGrid", "simulate"):
        with pytest.raises(FlowerMissing):
            getattr(flower, name)


def test_a_flower_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version", lambda name: "1.9.0")
    with pytest.raises(FlowerMissing, match=r"1\.9\.0 is installed"):
        need_flower()


def test_versions_are_read() -> None:
    assert [parsed(text) for text in ("1.41.0", "2.0", "1.30.0.dev1", "", "x.y")] == [
        (1, 41), (2, 0), (1, 30), (0, 0), (0, 0),
    ]  # fmt: skip


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flower.nothing


def test_importing_the_adapter_does_not_import_flower() -> None:
    eager = {path.stem for path in Path(flower.__file__).parent.rglob("*.py") if _imports_flower(path.read_text())}
    assert eager == {
        "strategy",
        "virtual_grid",
        "tcp_grid",
        "messages",
    }  # which the package imports when they are asked for


def _imports_flower(source: str) -> bool:
    """Whether a module's own lines do, outside of functions."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or node.names[0].name for node in found]
    return any(name.split(".")[0] == "flwr" for name in names)
