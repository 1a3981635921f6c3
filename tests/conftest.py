"""Tests that start processes or build networks run one after another, in one of the workers of `pytest -n 2`."""

from __future__ import annotations

import pytest

IN_TURN = ("processes", "namespaces")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(name) for name in IN_TURN):
            item.add_marker(pytest.mark.xdist_group("in turn"))
