"""Places in few bits on a GPU: the bytes of plain torch, and what no encoder wrote is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the extra gpu is not installed")

from gossamer.base.kernels.reference import index_coding as truth
from gossamer.base.kernels.triton import places as fast
from gossamer.errors import MalformedError

# (places, entries, room beyond the places): nothing, one, bitmaps, one low bit, more than a program's share of each
SIZES = [(0, 40, 0), (0, 40, 9), (1, 1, 0), (1, 40, 0), (3, 9, 0), (3, 40, 7), (7, 64, 0), (64, 65, 0), (50, 300, 0)]
SIZES += [(900, 90_000, 0), (1025, 1_000_000, 200), (2049, 5000, 0), (20_000, 30_000, 0), (40, 2**31 - 1, 1)]
every_size = pytest.mark.parametrize(("count", "n", "more"), SIZES)


def int32(places: Sequence[int]) -> Tensor:
    return torch.tensor(list(places), dtype=torch.int32)


def selection(count: int, n: int, seed: int = 0) -> Tensor:
    """(count,) places, the last one among them, so that codes are full to their end."""
    generator = torch.Generator().manual_seed(seed)
    if n > 2**21:
        drawn = torch.randint(n - 1, (count,), generator=generator).unique()
        return torch.cat([drawn, drawn.new_tensor([n - 1])])[-count:].int()
    drawn = torch.randperm(n - 1, generator=generator)[: max(count - 1, 0)]
    return torch.cat([drawn, drawn.new_tensor([n - 1])])[: max(count, 0)].sort().values.int()


def outcome(read: Callable[..., Tensor], coded: Tensor, *sizes: int) -> list[int] | None:
    try:
        return read(coded, *sizes).tolist()
    except MalformedError:
        return None


@every_size
def test_codes_have_the_bytes_of_plain_torch(count: int, n: int, more: int) -> None:
    places = selection(count, n)
    sizes = n, len(places) + more
    coded = fast.encode_places(places, *sizes)
    assert coded.dtype == torch.uint8
    assert torch.equal(coded, truth.encode_places(places, *sizes))
    found = fast.decode_places(coded, len(places), *sizes)
    assert found.dtype == torch.int32
    assert torch.equal(found, places)


def test_the_check_sees_bits_that_lie_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    places = selection(900, 90_000)
    monkeypatch.setattr(fast, "_lows", lambda room, low: -(-room * low // 8) - 1)
    coded = fast.encode_places(places, 90_000)
    assert not torch.equal(coded, truth.encode_places(places, 90_000))


def test_a_code_that_begins_anywhere() -> None:
    places = selection(900, 90_000)
    coded = truth.encode_places(places, 90_000)
    for shift in (1, 3):
        moved = torch.cat([torch.full((shift,), 255, dtype=torch.uint8), coded])[shift:]
        assert torch.equal(fast.decode_places(moved, 900, 90_000), places)


@pytest.mark.parametrize(("count", "n", "more"), [(12, 100, 0), (5, 1000, 3), (40, 60, 0), (3, 40, 0), (0, 40, 0)])
def test_any_bytes_mean_the_same_to_both_or_nothing(count: int, n: int, more: int) -> None:
    whole = truth.encode_places(selection(count, n), n, count + more)
    answers = []
    for at in range(0, len(whole), max(1, len(whole) // 12)):
        for change in (0b100, 0b10000000):
            coded = whole.clone()
            coded[at] ^= change
            answers.append(outcome(fast.decode_places, coded, count, n, count + more))
            assert answers[-1] == outcome(truth.decode_places, coded, count, n, count + more)
    assert None in answers


def test_some_changed_bytes_are_other_places() -> None:
    """So that the test before this one compares more than refusals."""
    coded = truth.encode_places(int32(range(0, 100, 9)), 100)
    coded[0] ^= 0b100
    found = outcome(fast.decode_places, coded, 12, 100)
    assert found not in (None, list(range(0, 100, 9)))
    assert found == outcome(truth.decode_places, coded, 12, 100)


def test_places_that_do_not_ascend_in_their_low_bits_are_refused() -> None:
    """Across the border of what one program reads, too."""
    low, count, n = truth.low_bits(1100, 90_000), 1100, 90_000
    assert low > 1
    for first in (5, 1023):
        places = selection(count, n)
        places[first : first + 2] = torch.tensor([(int(places[first]) >> low << low) + 1] * 2)
        coded = truth.encode_places(places, n)
        assert outcome(truth.decode_places, coded, count, n) is None
        assert outcome(fast.decode_places, coded, count, n) is None


@pytest.mark.parametrize(
    ("coded", "count"),
    [
        (torch.zeros(3, dtype=torch.uint8), 3),
        (torch.zeros(2, dtype=torch.uint8), 3),
        (torch.zeros(3, dtype=torch.int8), 3),
        (torch.zeros(3, 1, dtype=torch.uint8), 3),
        (torch.full((3,), 255, dtype=torch.uint8), 3),
        (torch.zeros(3, dtype=torch.uint8), -1),
        (torch.zeros(3), 3),
    ],
    ids=["none set", "short", "signed", "a matrix", "all set", "fewer than none", "floats"],
)
def test_an_invalid_code_is_refused(coded: Tensor, count: int) -> None:
    with pytest.raises(MalformedError):
        fast.decode_places(coded, count, 40)


@pytest.mark.parametrize("places", [[5, 5], [5, 4], [0, 40], [-1, 3], [*range(1024), 1023], [0, 2**31 - 1]], ids=len)
def test_places_out_of_order_are_not_encoded(places: list[int]) -> None:
    n = max(40, len(places))
    with pytest.raises(ValueError, match="ascend"):
        fast.encode_places(int32(places), n, len(places))
    assert len(fast.encode_places(int32(sorted({min(max(each, 0), n - 1) for each in places})), n))


def test_other_places_go_to_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a kernel was started")

    monkeypatch.setattr(fast, "tiles", refuse)
    places = selection(30, 400)
    assert torch.equal(fast.encode_places(places.long(), 400), truth.encode_places(places, 400))
    with pytest.raises(AssertionError, match="started"):
        fast.encode_places(places, 400)
