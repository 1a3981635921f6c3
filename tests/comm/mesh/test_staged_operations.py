"""Staged operations: through a device that puts every copy off, answers are those of the plain mesh, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.deferred_device import DeferredDevice, DeferredEvent, Misused, OneQueueDevice
from support.mesh_group import Group, SealedSharedGroup, SharedGroup
from support.staged_group import small_chunks, stage, watched
from torch import Tensor

from gossamer.algorithms.collectives import (
    Collective,
    DirectAllReduce,
    HalvingDoubling,
    HierarchicalAllReduce,
    RingAllReduce,
    TreeAllReduce,
    bounds,
)
from gossamer.base.kernels.library import are_built
from gossamer.base.op_semantics import answer_all
from gossamer.base.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Coalesced,
    CollectiveOp,
    InGroup,
    NeighborAllGather,
    payload_form,
)
from gossamer.comm.mesh import staged_operations
from gossamer.comm.mesh.staged_operations import StagedOperations
from gossamer.comm.mesh.transport import MeshTransport
from gossamer.comm.staging import chunk_tables
from gossamer.comm.staging.device_copies import Way
from gossamer.comm.staging.pinned_arena import PinnedArena
from gossamer.comm.staging.staging_area import StagingArea

pytestmark = pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")

TABLES = [
    DirectAllReduce(),
    RingAllReduce(),
    HalvingDoubling(),
    TreeAllReduce(),
    HierarchicalAllReduce(per_node=2),
]
FORMATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64]
Make = Callable[[int], CollectiveOp]


@pytest.fixture(autouse=True)
def chunks() -> Iterator[None]:
    with small_chunks():
        yield


def drawn(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 20
    return made.to(dtype)


def payload(rank: int, extra: int = 0) -> tuple[Tensor, ...]:
    return (
        drawn(rank, 301 + extra).view(1, -1),
        torch.tensor([rank, 7], dtype=torch.int16),
        torch.zeros(0, dtype=torch.int64),
        drawn(rank, 12).view(3, 4).t().gt(0),
        drawn(rank, 400, torch.float64),
    )


def ring(rank: int, world: int) -> tuple[tuple[int, float], ...]:
    return tuple((peer % world, 1 / 3) for peer in sorted({(rank - 1) % world, rank, (rank + 1) % world}))


def operations(world: int) -> list[Make]:
    """One of each kind, whose sizes are no multiples of anything."""

    def half(rank: int) -> tuple[int, ...]:
        return tuple(each for each in range(world) if each % 2 == rank % 2)

    return [
        *(lambda rank, dtype=dtype: AllReduceMean(drawn(rank, 1003, dtype)) for dtype in FORMATS),
        lambda rank: AllReduceMean(drawn(rank, 1)),
        lambda rank: AllReduceMean(drawn(rank, 0)),
        lambda rank: AllReduceMean(drawn(rank, 600).view(20, 30).t()),
        lambda rank: AllReduceMean(drawn(rank, 600), torch.empty(600)),
        lambda rank: AllReduceMean(drawn(rank, 600).view(20, 30), torch.empty(30, 20).t()),
        lambda rank: AllGather(payload(rank)),
        lambda rank: AllGather((torch.zeros(0),)),
        lambda rank: AllToAll(tuple((drawn(10 * rank + peer, 200 * peer + 1),) for peer in range(world))),
        lambda rank: unequal_gather(rank, range(world)),
        lambda rank: unequal_exchange(rank, world),
        lambda rank: InGroup(half(rank), unequal_gather(rank, half(rank))),
        lambda rank: NeighborAllGather(payload(rank), ring(rank, world)),
        lambda rank: NeighborAllGather(payload(rank), (((rank + 1) % world, 1.0),), ((rank - 1) % world,)),
        # sub-groups of unlike operations and sizes, then something of all
        lambda rank: InGroup(half(rank), AllReduceMean(drawn(rank, 500 + 700 * (rank % 2)))),
        lambda rank: InGroup(
            half(rank), AllGather(payload(rank, rank % 2)) if rank % 2 else AllReduceMean(drawn(rank, 9))
        ),
        lambda rank: InGroup((rank,), AllReduceMean(drawn(rank, 200, torch.int32))),
        lambda rank: InGroup((rank,), AllGather(payload(rank))),
        lambda rank: Coalesced(
            (
                AllReduceMean(drawn(rank, 700)),
                AllGather(payload(rank)),
                InGroup(half(rank), AllReduceMean(drawn(rank, 300))),
            )
        ),
    ]


def unequal(rank: int) -> tuple[Tensor, ...]:
    """A payload with another number of tensors and of bytes on each rank."""
    return (drawn(rank, 100 * rank + 3), *(torch.full((rank, 2), rank, dtype=torch.int16) for _ in range(rank)))


def unequal_gather(rank: int, ranks: Sequence[int]) -> AllGather:
    return AllGather(unequal(rank), tuple(payload_form(unequal(each)) for each in ranks))


def unequal_exchange(rank: int, world: int) -> AllToAll:
    return AllToAll((unequal(rank),) * world, tuple(payload_form(unequal(each)) for each in range(world)))


def alike(heard: Any, expected: Any) -> bool:
    if isinstance(heard, Tensor):
        return heard.dtype == expected.dtype and heard.shape == expected.shape and _same_bits(heard, expected)
    return len(heard) == len(expected) and all(map(alike, heard, expected))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (one, other)))


def answers(group: Group, makes: Sequence[Make], devices: Sequence[DeferredDevice] | None = None) -> list[Any]:
    """Of each rank: all operations, two of them under way at a time."""

    def act(rank: int) -> list[Any]:
        transport, found, waiting = group.transports[rank], [], []
        for make in makes:
            waiting.append(transport.begin(make(rank)))
            if len(waiting) == 2:
                found.append(waiting.pop(0)())
        found += [wait() for wait in waiting]
        if devices:
            devices[rank].synchronize()
        return found

    return group.all(act)


def check(kind: type[Group], world: int, table: Collective, makes: Sequence[Make], **how: Any) -> None:
    with kind(world, table) as plain:
        summed = [make for make in makes if not _is_gathered(make(0))]
        expected = answers(plain, summed)
    reference = [answer_all([make(rank) for rank in range(world)]) for make in makes if _is_gathered(make(0))]
    with kind(world, table) as group:
        devices = stage(group, **how)
        with watched(devices.__getitem__):
            found = answers(group, makes, devices)
    for rank in range(world):
        of_plain, of_reference = iter(expected[rank]), iter(reference)
        for make, heard in zip(makes, found[rank], strict=True):
            due = next(of_reference)[rank] if _is_gathered(make(0)) else next(of_plain)
            assert alike(heard, due), (make(rank), heard, due)


def _is_gathered(op: CollectiveOp) -> bool:
    """A mean of a format that the loops do not sum: the plain mesh gives it to the engine."""
    return isinstance(op, AllReduceMean) and op.tensor.dtype in (torch.int64, torch.complex64)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_operation_is_answered_as_by_the_plain_mesh(world: int) -> None:
    check(Group, world, RingAllReduce(), operations(world))


@pytest.mark.parametrize("table", TABLES, ids=repr)
def test_means_have_the_bits_of_every_table(table: Collective) -> None:
    makes: list[Make] = [lambda rank, n=n: AllReduceMean(drawn(rank, n)) for n in (1, 5, 255, 256, 1003, 4096)]
    check(Group, 4, table, [*makes, lambda rank: InGroup((0, 1, 2, 3), AllReduceMean(drawn(rank, 999)))])


@pytest.mark.parametrize("kind", [SharedGroup, SealedSharedGroup])
def test_over_every_kind_of_connection(kind: type[Group]) -> None:
    check(kind, 2, DirectAllReduce(), operations(2))


@pytest.mark.parametrize("pace", [0.0, 1.0])
@pytest.mark.parametrize("capacity_bytes", [64, 4096])
def test_whatever_the_pace_of_the_device_and_however_little_memory(pace: float, capacity_bytes: int) -> None:
    check(Group, 3, RingAllReduce(), operations(3), pace=pace, capacity_bytes=capacity_bytes)


def test_ranks_whose_devices_and_memories_are_unlike_understand_each_other() -> None:
    """One device never goes on by itself, one always has; their memories differ; rank 2 has no device."""
    makes = operations(3)
    with Group(3, RingAllReduce()) as plain:
        expected = answers(plain, [make for make in makes if not _is_gathered(make(0))])
    with Group(3, RingAllReduce()) as group:
        first, second, _ = stage(group, pace=0.0, capacity_bytes=2**12)
        second.pace = 1.0
        mine = group.transports[2]
        group.transports[2] = MeshTransport(
            mine._operations, mine._fallback, StagedOperations(mine._operations, everything=True)
        )

        def finish(rank: int) -> None:
            (first, second)[rank].synchronize()

        found = answers(group, makes)
        for rank in range(2):
            finish(rank)
    for rank in range(3):
        due = iter(expected[rank])
        for make, heard in zip(makes, found[rank], strict=True):
            assert _is_gathered(make(0)) or alike(heard, next(due))


@pytest.mark.parametrize("in_order", [True, False])
def test_blocking_copies_suit_a_device_whose_queue_orders_them(in_order: bool) -> None:
    """MPS has one queue. On a device whose copies overtake its computing, the answers are wrong."""
    with Group(2, RingAllReduce()) as plain:
        due = answers(plain, [lambda rank: AllReduceMean(drawn(rank, 1003))])[0][0]
    with Group(2, RingAllReduce()) as group:
        devices = [OneQueueDevice(rank, 0.0, in_order=in_order) for rank in range(2)]
        stage(group, devices=devices)
        found = of_computed(group, devices, AllReduceMean)
    assert [alike(each, due) for each in found] == [in_order, in_order]


def of_computed(group: Group, devices: Sequence[DeferredDevice], make: Callable[[Tensor], CollectiveOp]) -> list[Any]:
    """Answers of tensors that the devices compute first, as slowly as they can."""

    def act(rank: int) -> Any:
        found = group.transports[rank].answer(make(devices[rank].computed(drawn(rank, 1003))))
        devices[rank].synchronize()
        return found

    with watched(devices.__getitem__):
        return group.all(act)


MADE: list[Callable[[Tensor], CollectiveOp]] = [
    AllReduceMean,
    lambda x: AllReduceMean(x, x),
    lambda x: AllReduceMean(x.view(torch.int32)),
    lambda x: AllGather((x,)),
    lambda x: AllToAll(((x,), (x,))),
    lambda x: NeighborAllGather((x,), ((0, 0.5), (1, 0.5))),
]


def check_computed() -> None:
    for make in MADE:
        with Group(2) as group:
            found = of_computed(group, stage(group, pace=0.0), make)
        due = answer_all([make(drawn(rank, 1003)) for rank in range(2)])
        assert alike(found, due)


def test_what_is_still_being_computed_is_waited_for() -> None:
    check_computed()


def check_freed() -> None:
    """What a rank sends lies otherwise than it travels, so that a copy is sent which only the device still needs."""
    with Group(2) as group:
        devices = stage(group, pace=0.0)
        found = group.answers([AllGather((drawn(rank, 600).view(20, 30).t(),)) for rank in range(2)])
        for device in devices:
            device.synchronize()
    due = [(drawn(rank, 600).view(20, 30).t(),) for rank in range(2)]
    assert alike(found, [due, due])


def test_what_nobody_holds_any_more_is_kept_until_it_is_copied() -> None:
    check_freed()


def copies_begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By rank, how many copies to the host were begun when the first was waited for, of three operations together."""
    found: dict[DeferredDevice, int] = {}
    await_here = DeferredEvent.await_here

    def noting(self: DeferredEvent) -> None:
        if self.stream is Way.TO_HOST:
            found.setdefault(self.device, len(self.device.under_way()))
        await_here(self)

    monkeypatch.setattr(DeferredEvent, "await_here", noting)
    with Group(2) as group:
        devices = stage(group, pace=0.0)
        ops = [Coalesced(tuple(AllGather((drawn(rank, n),)) for n in (9, 5, 7))) for rank in range(2)]
        assert alike(group.answers(ops), answer_all(ops))
    return [found[device] for device in devices]


def test_copies_of_all_that_is_asked_together_are_begun_before_one_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert copies_begun(monkeypatch) == [3, 3]


def test_everyone_has_what_the_source_had() -> None:
    def given(rank: int) -> list[Tensor]:
        return [*payload(rank), drawn(rank, 6, torch.complex64).view(2, 3).t()]

    with Group(3) as group:
        devices = stage(group)
        filled = [given(rank) for rank in range(3)]
        with watched(devices.__getitem__):
            group.all(lambda rank: group.transports[rank].broadcast_(filled[rank], 2))
        for device in devices:
            device.synchronize()
    assert alike(filled, [given(2)] * 3)


def test_memory_is_bounded_and_taken_once() -> None:
    with Group(2) as group:
        devices = stage(group, capacity_bytes=2**13)
        for _ in range(3):
            group.answers([AllReduceMean(drawn(rank, 50_000)) for rank in range(2)])
    assert [device.pinned_bytes for device in devices] == [2**13] * 2


def test_where_nobody_has_a_device_nothing_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_operations, "StagedOp", None)
    with Group(2) as group:
        assert alike(group.answers([AllReduceMean(drawn(0, 9))] * 2), [drawn(0, 9)] * 2)


# -- twins ---------------------------------------------------------------------------------------------------------


def test_the_check_catches_who_does_not_wait_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeferredEvent, "await_here", lambda self: None)
    with pytest.raises((AssertionError, Misused)):
        check_computed()


def test_the_check_catches_copies_of_what_is_not_computed_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeferredEvent, "precede", lambda self, way: None)
    with pytest.raises(AssertionError):
        check_computed()


def test_the_check_catches_answers_that_have_not_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeferredEvent, "precede_current", lambda self: None)
    with pytest.raises(AssertionError):
        check_computed()


def test_the_check_catches_operations_that_begin_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = StagedOperations.ready

    def begun(self: StagedOperations, op: Any, ranks: Any) -> Any:
        wait = ready(self, op, ranks)()
        return lambda: wait

    monkeypatch.setattr(StagedOperations, "ready", begun)
    assert copies_begun(monkeypatch) == [1, 1]


def test_the_check_catches_a_slot_that_is_used_again_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    give = StagingArea.give

    def early(self: StagingArea, moves: Any, slot: Any, ready: Any) -> Any:
        done = give(self, moves, slot, ready)
        arena = self._arena
        assert isinstance(arena, PinnedArena)
        arena.give_back(slot)
        return done

    monkeypatch.setattr(StagingArea, "give", early)
    with pytest.raises(Misused, match="on its way"), Group(2) as group:
        of_computed(group, stage(group, pace=0.0), AllReduceMean)


def test_the_check_catches_memory_that_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeferredDevice, "keep", lambda self, way, tensor: None)
    with pytest.raises(Misused, match="keep"):
        check_freed()


def test_the_check_catches_sums_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a tensor instead of its pieces."""

    def whole(numel: int, pieces: int, itemsize: int, *, whole: bool) -> list[list[tuple[int, int]]]:
        cuts = [*range(0, numel, 60), numel]
        return [[(low + a, low + b) for a, b in pairwise(bounds(high - low, pieces))] for low, high in pairwise(cuts)]

    monkeypatch.setattr("gossamer.comm.mesh.staged_operations.mean_chunks", whole)
    with pytest.raises(AssertionError):
        check(Group, 3, RingAllReduce(), [lambda rank: AllReduceMean(drawn(rank, 1003))])


def counted() -> list[int]:
    """How many operations each rank's connections have begun, after sub-groups whose tensors differ in size."""
    with Group(2) as group:
        stage(group)
        group.answers([InGroup((rank,), AllGather((drawn(rank, 100 + 900 * rank),))) for rank in range(2)])
        return [mesh._next for mesh in group.meshes]


def test_sub_groups_count_operations_alike() -> None:
    assert counted() == [chunk_tables.PART_CHUNKS] * 2


def test_the_check_catches_sub_groups_that_count_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        staged_operations, "byte_chunks", lambda nbytes, rows, whole: chunk_tables.byte_chunks(nbytes, rows, whole=True)
    )
    assert counted() == [2, 16]


def test_a_device_that_has_no_copies_is_named() -> None:
    with Group(1) as group:
        operations = group.transports[0]._operations
        with pytest.raises(Exception, match="tensors on meta cannot be sent"):
            StagedOperations(operations).ready(AllGather((torch.empty(3, device="meta"),)), (0,))
