"""Buffer pool: memory is reused when, and only when, no tensor refers to it; unused memory follows the need."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from support.nightly import nightly

from gossamer.base.kernels import buffer_pool
from gossamer.base.kernels.buffer_pool import ALIGNMENT, KEPT, SLACK, WINDOW_SECONDS, Block, Blocks

NUMEL = buffer_pool.LARGE


@pytest.fixture(autouse=True)
def pool_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.collect()
    monkeypatch.setattr(buffer_pool, "blocks", Blocks())
    yield
    gc.collect()


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


def test_memory_may_come_back_while_other_memory_is_taken() -> None:
    lease = buffer_pool.empty(NUMEL, torch.float32)
    with buffer_pool.blocks._lock:  # as if the collector ran in the middle
        del lease
        gc.collect()


def test_small_ones_are_plain() -> None:
    buffer_pool.empty(10, torch.float32)
    gc.collect()
    assert not buffer_pool.blocks.returned
    assert buffer_pool.blocks.peak == 0


def check_on_the_processor() -> None:
    """A compiled loop writes wherever it is told to."""
    with torch.device("meta"):
        assert all(buffer_pool.empty(numel, torch.float32).is_cpu for numel in (3, NUMEL))


def test_memory_is_the_processors_regardless_of_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    check_on_the_processor()
    monkeypatch.setattr(buffer_pool, "empty", lambda numel, dtype: torch.empty(numel, dtype=dtype))
    with pytest.raises(AssertionError):
        check_on_the_processor()


def test_released_memory_is_freed() -> None:
    for _ in range(2):
        tensors = [buffer_pool.empty(NUMEL, torch.float32) for _ in range(3)]
        del tensors
        gc.collect()
        buffer_pool.blocks.release()
        assert buffer_pool.blocks.idle_bytes == buffer_pool.blocks.in_use == buffer_pool.blocks.peak == 0


# -- laws of unused memory, over planted sequences in virtual time -----------------------------------------------------

MB = 10**6


@dataclass
class Leases:
    """Takes blocks of a pool and gives them back, in virtual time. Their pages are never touched.

    fresh: bytes of new blocks; history: (moment, bytes in use).
    """

    now: float = 0.0
    fresh: int = 0
    history: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blocks = Blocks(clock=lambda: self.now)

    def take(self, nbytes: int) -> Block:
        unused = {id(block) for block in (*self.blocks.idle, *self.blocks.returned)}
        block = self.blocks.take(nbytes)
        if id(block) not in unused:
            self.fresh += block.nbytes
        self.history.append((self.now, self.blocks.in_use))
        return block

    def give_back(self, block: Block) -> None:
        self.blocks.returned.append(block)

    def recent_peak(self, seconds: float) -> int:
        return max(nbytes for moment, nbytes in self.history if moment >= self.now - seconds)


def check_idle_memory_follows_the_peak(seed: int) -> None:
    """Phases of different need, with leases of random sizes and lives, less than a second apart."""
    draw, leases = random.Random(seed), Leases()
    live: list[Block] = []
    for _ in range(12):
        most = draw.choice([3, 10, 30, 100])
        for _ in range(draw.choice([20, 200])):
            leases.now += draw.uniform(0, 1)
            while live and (len(live) >= 6 or draw.random() < 0.5):
                leases.give_back(live.pop(draw.randrange(len(live))))
            live.append(leases.take(round(draw.uniform(1, most) * MB)))
            total = leases.blocks.in_use + leases.blocks.idle_bytes
            assert total <= SLACK * leases.recent_peak(2 * (WINDOW_SECONDS + 1)) + 1
            assert leases.blocks.idle_bytes <= KEPT
            assert leases.blocks.in_use == sum(block.nbytes for block in live)


@pytest.mark.parametrize("seed", [*range(3), *nightly(*range(3, 20))])
def test_all_blocks_are_bounded_by_the_recent_peak_in_use(seed: int) -> None:
    check_idle_memory_follows_the_peak(seed)


def test_the_check_finds_blocks_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Blocks, "_trim", lambda self: None)
    with pytest.raises(AssertionError):
        check_idle_memory_follows_the_peak(0)


def int8_step(leases: Leases, part: int) -> None:
    """Leases of a step of Int8 over four workers. part: bytes of a part's codes."""
    sent = [leases.take(part) for _ in range(4)]
    received, mean = leases.take(3 * part), leases.take(4 * part)
    encoded = leases.take(part)
    for block in (received, mean):
        leases.give_back(block)
    answers = leases.take(3 * part)
    for block in (*sent, encoded, answers):
        leases.give_back(block)


@pytest.mark.parametrize("seconds", [0.01, 1.0, 60.0])
@pytest.mark.parametrize("part", [2 * MB, 20 * MB])
def test_steady_steps_take_no_new_pages_after_the_first(seconds: float, part: int) -> None:
    leases = Leases()
    int8_step(leases, part)
    after_first = leases.fresh
    for _ in range(100):
        leases.now += seconds
        int8_step(leases, part)
    assert leases.fresh == after_first


def rare(large: int, seconds: float) -> Leases:
    """A large buffer every so many seconds, and small ones ten times a second."""
    leases = Leases()
    for _ in range(20):
        leases.give_back(leases.take(large))
        for _ in range(round(10 * seconds)):
            leases.now += 0.1
            leases.give_back(leases.take(2 * MB))
    return leases


def test_a_rarely_used_buffer_is_freed_between_its_uses() -> None:
    leases = rare(50 * MB, 60.0)
    assert leases.blocks.idle_bytes < 50 * MB
    assert leases.fresh > 20 * 50 * MB  # refilled once a minute


def test_a_buffer_of_every_window_is_kept() -> None:
    assert rare(200 * MB, WINDOW_SECONDS - 1).fresh < 2 * 200 * MB


def test_a_peak_of_the_start_is_forgotten() -> None:
    """As of a model that was copied whole once, before its steps."""
    leases = Leases()
    leases.give_back(leases.take(60 * MB))
    for _ in range(300):
        leases.now += 0.1
        int8_step(leases, 2 * MB)
    assert leases.blocks.idle_bytes <= SLACK * 12 * (2 * MB + ALIGNMENT)
