"""Which bad networks a test goes through: a few by default, GOSSAMER_SEEDS of them from GOSSAMER_FIRST_SEED on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from support.nightly import nightly

BLOCK = 25  # seeds in one test, so that `pytest -n 2` has many tests to share out
FIRST, COUNT = "GOSSAMER_FIRST_SEED", "GOSSAMER_SEEDS"


def blocks(default: int) -> list[object]:
    """The seeds, as many as a test makes of them. Without the environment `default`, three quarters nightly."""
    first, count = (int(os.environ.get(name, other)) for name, other in ((FIRST, 0), (COUNT, default)))
    found = [range(start, min(start + BLOCK, first + count)) for start in range(first, first + count, BLOCK)]
    day = len(found) if COUNT in os.environ else -(-len(found) // 4)
    return [*found[:day], *nightly(*found[day:])]


def block_name(block: range) -> str:
    return f"seeds {block.start} to {block.stop - 1}"


@contextmanager
def replayed(seed: int, test: str) -> Iterator[None]:
    """Add to whatever is raised how to see it again. test: what pytest's -k finds it by."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"Again: {FIRST}={seed} {COUNT}=1 pytest tests -k {test!r}")
        raise
