"""Kernel switch: compiled loops or plain torch, chosen while a program runs, so that one round can time both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from gossamer.base.kernels.library import LIBRARY, wanted_kernels

VARIABLE = "GOSSAMER_KERNELS"


@contextmanager
def using(name: str) -> Iterator[None]:
    """GOSSAMER_KERNELS is `name` for a while."""
    before = os.environ.get(VARIABLE)
    _ask_for(name)
    try:
        yield
    finally:
        _ask_for(before)


def available() -> list[str]:
    return ["native", "reference"] if LIBRARY.exists() else ["reference"]


def _ask_for(name: str | None) -> None:
    if name is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = name
    wanted_kernels.cache_clear()
