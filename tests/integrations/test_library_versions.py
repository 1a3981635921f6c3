"""Versions of other libraries: a missing one and an old one are refused with the line that installs it."""

from __future__ import annotations

import pytest

from gossamer.integrations.library_versions import LibraryVersionError, require_library


def test_a_version_at_or_above_the_floor_is_taken() -> None:
    require_library("torch", "2.10", extra="torch")
    require_library("torch", "2.9.9", extra="torch")


@pytest.mark.parametrize("floor", ["99.0", "2.99999"])
def test_an_older_one_is_refused_with_the_line_to_write(floor: str) -> None:
    with pytest.raises(LibraryVersionError, match=rf"pip install 'torch>={floor}'"):
        require_library("torch", floor, extra="torch")


def test_a_missing_one_is_refused_with_the_line_to_write() -> None:
    with pytest.raises(LibraryVersionError, match=r"pip install 'gossamer\[nothing\]'"):
        require_library("no-such-distribution", "1.0", extra="nothing")
