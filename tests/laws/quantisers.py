"""Compressors that send every entry in a few bits. Subjects of the laws, and their bytes."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.compressors import Compressor

EXACT: list[Compressor] = []
ROUNDED: list[Compressor] = []
FORMULAS: list[tuple[Compressor, Callable[[int], float]]] = []
