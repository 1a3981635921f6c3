"""Buffer pool: memory is reused when, and only when, no tensor refers to it."""

from __future__ import annotations

import gc

import pytest
import torch

from gossamer.base.kernels import buffer_pool

NUMEL = buffer_pool.LARGE


def test_memory_that_nobody_sees_is_used_again() -> None:
    first = buffer_pool.empty(NUMEL, torch.float32)
    where = first.data_ptr()
    assert where % buffer_pool.ALIGNMENT == 0
    del first
    gc.collect()
    assert buffer_pool.empty(NUMEL, torch.float32).data_ptr() == where


def test_a_view_of_another_type_keeps_memory() -> None:
    first = buffer_pool.empty(NUMEL, torch.float32)
    first.fill_(3.0)
    view = first.view(torch.uint8)[8:].view(torch.float32)[5:]
    del first
    gc.collect()
    others = [buffer_pool.empty(NUMEL, torch.float32).zero_() for _ in range(3)]
    assert float(view.min()) == 3.0
    assert all(other.data_ptr() + 4 * 7 != view.data_ptr() for other in others)


def test_two_that_live_at_once_lie_apart() -> None:
    a, b = buffer_pool.empty(NUMEL, torch.int8), buffer_pool.empty(NUMEL, torch.int8)
    a.fill_(1)
    b.fill_(2)
    assert int(a.max()) == 1


def test_little_lies_idle() -> None:
    for count in range(1, 40):
        buffer_pool.empty(NUMEL * count, torch.float32)
    gc.collect()
    buffer_pool.empty(NUMEL, torch.float32)
    assert 0 < sum(block.nbytes for block in buffer_pool._idle) <= buffer_pool.KEPT


def test_memory_may_come_back_while_other_memory_is_taken() -> None:
    lease = buffer_pool.empty(NUMEL, torch.float32)
    with buffer_pool._lock:  # as if the collector ran in the middle
        del lease
        gc.collect()


def test_small_ones_are_plain() -> None:
    before = len(buffer_pool._returned)
    buffer_pool.empty(10, torch.float32)
    gc.collect()
    assert len(buffer_pool._returned) == before


def check_on_the_processor() -> None:
    """A compiled loop writes wherever it is told to."""
    with torch.device("meta"):
        assert all(buffer_pool.empty(numel, torch.float32).is_cpu for numel in (3, NUMEL))


def test_memory_is_the_processors_regardless_of_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    check_on_the_processor()
    monkeypatch.setattr(buffer_pool, "empty", lambda numel, dtype: torch.empty(numel, dtype=dtype))
    with pytest.raises(AssertionError):
        check_on_the_processor()
