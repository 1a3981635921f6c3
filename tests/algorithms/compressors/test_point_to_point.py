"""Point-to-point encoding: every compressor sends one peer what it sends a group."""

from __future__ import annotations

import pytest
import torch
from laws import momentum, quantisers, same_places, sharded, sparse_sum
from laws import sparse as sparse_family
from laws.laws import LAYOUT

from gossamer.algorithms.compressors import Compressor, Dense, Feedback, PowerSGD, Route, TopK, point_to_point
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.qsgd import QSGD
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.layout import FlatTensors, Layout, Slot
from gossamer.errors import MalformedError


def adapts(compressor: Compressor) -> bool:
    """Whether a reader must have heard all messages, so that recipes refuse it between two peers."""
    return any(isinstance(term, Compressor) and term.adapts for term in compressor.held())


EVERY = [
    Dense(),
    Dense(dtype="bfloat16"),
    PowerSGD(rank=2),
    Route(Feedback(TopK(density=0.1))),
    Route(Feedback(PowerSGD(rank=2)), rest=Feedback(Int8()), smallest=100),
    *(
        compressor
        for family in (quantisers, sparse_family, momentum, sharded, same_places, sparse_sum)
        for compressor in family.EXACT
        if not adapts(compressor)
    ),
]
AT = AggregationContext(step=3, seed=5, rank=2, world=4)


def numbers(step: int) -> FlatTensors:
    generator = torch.Generator().manual_seed(step)
    return FlatTensors(torch.randn(LAYOUT.numel, generator=generator), LAYOUT)


@pytest.mark.parametrize("compressor", EVERY, ids=repr)
def test_the_reader_has_the_writers_bits(compressor: Compressor) -> None:
    state = point_to_point.begin(compressor, numbers(0), AT)
    for step in range(3):
        x = numbers(step)
        letter = point_to_point.encode(compressor, x, state, AT)
        out = torch.full((LAYOUT.numel,), float("nan"))
        payload = tuple(tensor.clone() for tensor in letter.payload)
        point_to_point.decode(compressor, payload, LAYOUT, AT, out)
        assert torch.equal(out, letter.own().to(out.dtype))
        assert torch.equal(x.flat, numbers(step).flat)
        state = letter.next_state.after(state)


def hashed_slots(monkeypatch: pytest.MonkeyPatch, reads: int = 5) -> int:
    """How many slots are hashed while the same reader reads again."""
    compressor, x, out = Int8(), numbers(0), torch.empty(LAYOUT.numel)
    payload = point_to_point.encode(compressor, x, State(), AT).payload
    point_to_point.decode(compressor, payload, LAYOUT, AT, out)
    by_content, hashed = Slot.__hash__, list[str]()

    def counted(slot: Slot) -> int:
        hashed.append(slot.name)
        return by_content(slot)

    with monkeypatch.context() as patch:
        patch.setattr(Slot, "__hash__", counted)
        for _ in range(reads):
            point_to_point.decode(compressor, payload, LAYOUT, AT, out)
        assert torch.equal(out, point_to_point.encode(compressor, x, State(), AT).own())
    return len(hashed)


def test_a_reader_finds_what_it_found_without_a_look_at_every_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hashed_slots(monkeypatch) == 0


def test_a_reader_that_looks_at_all_of_them_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        point_to_point,
        "_parts_of",
        lambda compressor, layout, dtype: point_to_point._parts(compressor.item, layout.item, dtype),
    )
    assert hashed_slots(monkeypatch) == 5 * len(LAYOUT)


@pytest.mark.parametrize(
    "compressor", [Feedback(TopK(density=0.1)), Feedback(Int8()), Route(Feedback(TopK(0.1)))], ids=repr
)
def test_what_was_written_and_what_is_left_are_what_was_given(compressor: Compressor) -> None:
    state, given, sent = (
        point_to_point.begin(compressor, numbers(0), AT),
        torch.zeros(LAYOUT.numel),
        torch.zeros(LAYOUT.numel),
    )
    for step in range(20):
        x = FlatTensors(numbers(step).flat.mul_(64).round_(), LAYOUT)
        letter = point_to_point.encode(compressor, x, state, AT)
        given += x.flat
        sent += letter.own()
        state = letter.next_state.after(state)
    residual = torch.zeros(LAYOUT.numel)
    for packed in state.values():
        for name, view in packed.items():
            FlatTensors(residual, LAYOUT)[name].copy_(view)
    torch.testing.assert_close(sent + residual, given, atol=2e-3, rtol=0)


def test_uncompressed_parts_of_nested_routes_are_read_from_one_tensor() -> None:
    route = Route(Route(TopK(density=0.1), names="first.*"), names="second.*")
    layout = Layout.of({"first.weight": (32, 16), "second.weight": (16, 32)})
    x = FlatTensors(numbers(0).flat[: layout.numel], layout)
    message = point_to_point.encode(route, x, State(), AT)
    assert len(message.payload) == 1
    out = torch.empty(layout.numel)
    point_to_point.decode(route, message.payload, layout, AT, out)
    assert torch.equal(out, x.flat)
    with pytest.raises(MalformedError, match="expected a message of 1 tensors"):
        point_to_point.decode(route, message.payload * 2, layout, AT, out)


def test_workers_draw_for_themselves() -> None:
    x = FlatTensors(torch.full((LAYOUT.numel,), 0.3), LAYOUT)
    here, there = (
        point_to_point.encode(QSGD(levels=3), x, State(), AggregationContext(rank=rank, world=2)).own()
        for rank in range(2)
    )
    assert not torch.equal(here, there)
    assert torch.equal(
        here, point_to_point.encode(QSGD(levels=3), x, State(), AggregationContext(rank=0, world=5)).own()
    )


@pytest.mark.parametrize(
    "compressor", [Dense(), Feedback(TopK(density=0.1)), Route(Int8()), PowerSGD(rank=2)], ids=repr
)
def test_a_letter_that_nobody_wrote_is_refused(compressor: Compressor) -> None:
    payload = point_to_point.encode(
        compressor, numbers(1), point_to_point.begin(compressor, numbers(1), AT), AT
    ).payload
    out = torch.zeros(LAYOUT.numel)
    for wrong in (payload[:-1], (*payload, payload[0]), (payload[0].flatten()[:-1], *payload[1:]), ()):
        with pytest.raises(MalformedError):
            point_to_point.decode(compressor, wrong, LAYOUT, AT, out)
