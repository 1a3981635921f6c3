"""Tensor hashes: the same with any number of threads, and unlike wherever a number is."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from gossamer.base.kernels.checks import SHORT
from gossamer.train.session import startup_checks
from gossamer.train.session.startup_checks import tensor_hashes

CHUNK = 64  # bytes, so that small tensors have many
Hashes = Callable[[Iterable[Tensor]], list[str]]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_checks, "CHUNK_BYTES", CHUNK)


def tensors() -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    sizes = [0, 1, 3, 15, 16, 17, 31, 32, 33, 500, 5000]
    floats = [torch.randn(size, generator=draw) for size in sizes]
    return [*floats, torch.arange(77), torch.tensor(2.5), torch.tensor([True, False]), floats[-1].view(50, 100).T]


def check_changes(of: Hashes) -> None:
    """One element, an exchange of chunks, the length."""
    x = torch.arange(64, dtype=torch.float32)
    exchanged = torch.cat([x[16:32], x[:16], x[32:]])
    others = [x[:-1], x[:48], exchanged, torch.cat([x, torch.zeros(16)]), x.double()]
    for place in range(64):
        others.append(x.clone())
        others[-1][place] += 1
    hashes = of([x, *others])
    assert len({*hashes}) == len(hashes)


def test_every_change_is_seen() -> None:
    check_changes(tensor_hashes)
    zeros = tensor_hashes([torch.zeros(size) for size in (0, 1, 15, 16, 17, 32)])
    assert len({*zeros}) == len(zeros)


def test_the_number_of_threads_does_not_matter() -> None:
    once = tensor_hashes(tensors(), 1)
    for threads in (2, 3, 7, None):
        assert tensor_hashes(tensors(), threads) == once
    assert [tensor_hashes([tensor], 2)[0] for tensor in tensors()] == once


def test_compiled_loops_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else ranks of unlike machines would begin with an error."""
    monkeypatch.setattr(startup_checks, "CHUNK_BYTES", 2 * SHORT)
    long = [torch.arange(size, dtype=torch.float32) for size in (SHORT // 4, SHORT + 1, 3 * SHORT)]
    found = tensor_hashes(long)
    monkeypatch.setattr(startup_checks, "crc32", zlib.crc32)
    assert tensor_hashes(long) == found


def test_hash_is_independent_of_strides() -> None:
    matrix = torch.arange(600.0).view(20, 30)
    assert len({*tensor_hashes([matrix, matrix.T.contiguous().T, matrix.reshape(-1), matrix.clone()])}) == 1


def sums(of: Iterable[Tensor]) -> list[str]:
    """Chunks in any order."""
    return [str(sum(zlib.crc32(chunk.numpy()) for chunk in each.view(torch.uint8).split(CHUNK))) for each in of]


def first_chunks(of: Iterable[Tensor]) -> list[str]:
    return tensor_hashes([each[: CHUNK // each.itemsize] for each in of])


@pytest.mark.parametrize("broken", [sums, first_chunks])
def test_weaker_hashes_are_found_out(broken: Hashes) -> None:
    with pytest.raises(AssertionError):
        check_changes(broken)
