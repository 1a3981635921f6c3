"""Packages that few runs need: there with their first use, and not before."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gossamer

FIRST_USE = """
import sys, gossamer
assert not any(name.startswith(("gossamer.federated", "gossamer.parallel")) for name in sys.modules)
gossamer.parallel.remote, gossamer.parallel.boundary, gossamer.federated.client
"""


def test_they_are_imported_by_their_first_use() -> None:
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True)


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'gossamer' has no attribute 'paralel'"):
        _ = gossamer.paralel  # type: ignore[attr-defined]
