"""A pytest plugin that writes the calls of compiled kernels, with their buffers before and after, to a file.

    KERNEL_CALLS=build/kernel-calls .venv/bin/pytest -p support.kernel_calls tests/base/kernels

kernels-src/replay.cpp repeats the calls with a library of another processor and compares every byte.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Sequence
from typing import BinaryIO

import pytest
from torch import Tensor

from gossamer.base.kernels import library

# Their results differ between libraries (the matrix products of one worker), or they choose threads.
OMITTED = {"gossamer_low_rank_project", "gossamer_low_rank_back", "gossamer_use_threads"}
LARGEST = 1 << 20  # bytes of a call's buffers
NUMBER, FLOAT, BUFFER, POINTERS = range(4)
NULL = 0xFFFFFFFF


class Unknown(Exception):
    """An argument is a pointer to memory of unknown size."""


class Recorder:
    """Writes calls to a file. The size behind an address is known from `address` until the next call."""

    def __init__(self, to: BinaryIO) -> None:
        self.to = to
        self.sizes: dict[int, int] = {}
        self.calls = self.skipped = 0

    def note(self, tensor: Tensor | None) -> None:
        if tensor is not None:
            self.sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()

    def record(self, call: Callable[..., int], function: library.Function, arguments: Sequence[object]) -> int:
        """Call the function; write its arguments, and its buffers before and after."""
        try:
            return self._recorded(call, function, arguments)
        finally:
            self.sizes.clear()

    def _recorded(self, call: Callable[..., int], function: library.Function, arguments: Sequence[object]) -> int:
        places: dict[int, int] = {}
        try:
            if function.name in OMITTED:
                raise Unknown
            written = b"".join(map(self._written, arguments, function.arguments, [places] * len(arguments)))
            if sum(places.values()) > LARGEST:
                raise Unknown
        except Unknown:
            self.skipped += 1
            return call(function, *arguments)
        before = [ctypes.string_at(place, size) for place, size in places.items()]
        answer = call(function, *arguments)
        after = [ctypes.string_at(place, size) for place, size in places.items()]
        name = function.name.encode()
        buffers = b"".join(struct.pack("<Q", len(old)) + old + new for old, new in zip(before, after, strict=True))
        self.to.write(  # at once, since threads call kernels, too
            struct.pack("<I", len(name))
            + name
            + struct.pack("<I", len(places))
            + buffers
            + struct.pack("<I", len(arguments))
            + written
            + struct.pack("<q", answer)
        )
        self.calls += 1
        return answer

    def _written(self, argument: object, kind: type, places: dict[int, int]) -> bytes:
        if kind is ctypes.c_float:
            return struct.pack("<BfI", FLOAT, argument, 0)
        if kind is ctypes.c_double:
            return struct.pack("<Bd", FLOAT, argument)
        if kind is not ctypes.c_void_p:
            return struct.pack("<BQ", NUMBER, int(argument) & 0xFFFFFFFFFFFFFFFF)  # type: ignore[call-overload]
        if isinstance(argument, ctypes.Array) and argument._type_ is ctypes.c_void_p:
            indices = [NULL if place is None else self._index(place, None, places) for place in argument]
            return struct.pack(f"<BI{len(indices)}I", POINTERS, len(indices), *indices)
        if argument is None:
            return struct.pack("<BI", BUFFER, NULL)
        if isinstance(argument, int):
            return struct.pack("<BI", BUFFER, self._index(argument, None, places))
        held = getattr(argument, "_obj", argument)  # of ctypes.byref
        if not isinstance(held, ctypes.Array | ctypes._SimpleCData | ctypes.Structure):
            raise Unknown
        return struct.pack("<BI", BUFFER, self._index(ctypes.addressof(held), ctypes.sizeof(held), places))

    def _index(self, place: int, size: int | None, places: dict[int, int]) -> int:
        """The number of a buffer in this call; the same for the same address."""
        known = self.sizes.get(place) if size is None else size
        if known is None:
            raise Unknown
        places[place] = max(known, places.get(place, 0))
        return list(places).index(place)


_recorder: Recorder | None = None


def pytest_configure(config: pytest.Config) -> None:
    global _recorder
    import gossamer.base.kernels  # noqa: F401 (its modules hold the functions that are replaced below)

    recorder = _recorder = Recorder(open(os.environ["KERNEL_CALLS"], "wb"))  # noqa: SIM115 (closed at the end)
    address, addresses, call = library.address, library.addresses, library.Function.__call__

    def noted(tensor: Tensor | None) -> int | None:
        recorder.note(tensor)
        return address(tensor)

    def all_noted(tensors: Sequence[Tensor]) -> object:
        for tensor in tensors:
            recorder.note(tensor)
        return addresses(tensors)

    for module in [each for name, each in sys.modules.items() if name.startswith("gossamer.base.kernels")]:
        for name, old, new in (("address", address, noted), ("addresses", addresses, all_noted)):
            if getattr(module, name, None) is old:
                setattr(module, name, new)

    def recorded(function: library.Function, *arguments: object) -> int:
        return recorder.record(call, function, arguments)

    library.Function.__call__ = recorded  # type: ignore[method-assign]


def pytest_unconfigure(config: pytest.Config) -> None:
    if _recorder is not None:
        _recorder.to.close()
        print(f"kernel calls: {_recorder.calls} written, {_recorder.skipped} skipped")
