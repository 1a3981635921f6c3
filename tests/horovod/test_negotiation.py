"""Negotiation: calls of the ranks are matched by name, whatever their order; join, errors and lost ranks."""

from __future__ import annotations

import threading

import pytest
import torch
from support.horovod_workers import horovod
from support.virtual_workers import notices
from torch import Tensor

import gossamer.horovod.torch as hvd
from gossamer.comm.simulated import SimulatedGroup
from gossamer.horovod import negotiation
from gossamer.horovod.calls import AllReduceCall, BarrierCall, ReductionOp, as_bytes, from_bytes
from gossamer.horovod.exceptions import HorovodInternalError
from gossamer.horovod.negotiation import Lane


def one(value: float = 1.0) -> Tensor:
    return torch.tensor([value])


def test_named_calls_in_different_orders_meet() -> None:
    def work(rank: int) -> list[float]:
        names = ["a", "b", "c"] if rank == 0 else ["c", "a", "b"]
        handles = {name: hvd.allreduce_async(one(ord(name) + rank), name=name, op=hvd.Sum) for name in names}
        return [hvd.synchronize(handles[name]).item() for name in "abc"]

    assert horovod(work) == [[2.0 * ord(name) + 1 for name in "abc"]] * 2


def test_a_rank_that_waits_for_one_name_alone_does_not_hold_up_another() -> None:
    def work(rank: int) -> float:
        late = hvd.allreduce_async(one(), name="late", op=hvd.Sum) if rank == 0 else None
        early = hvd.allreduce(one(5), name="early", op=hvd.Max)
        late = late or hvd.allreduce_async(one(), name="late", op=hvd.Sum)
        return float(early + hvd.synchronize(late))

    assert horovod(work) == [7.0, 7.0]


def test_a_second_call_of_a_waiting_name_is_refused() -> None:
    def work(rank: int) -> None:
        if rank == 0:
            handle = hvd.allreduce_async(one(), name="twice")
            with pytest.raises(ValueError, match=r"Duplicate.*synchronize"):
                hvd.allreduce_async(one(), name="twice")
            hvd.barrier()
            hvd.synchronize(handle)
        else:
            hvd.barrier()
            hvd.allreduce(one(), name="twice")

    horovod(work)


def test_allreduces_of_one_round_travel_as_one() -> None:
    group = SimulatedGroup(2)
    counts = [0, 0]

    def counted(rank: int) -> None:
        answer = group.transports[rank].answer

        def count(op: object) -> object:
            counts[rank] += 1
            return answer(op)  # type: ignore[arg-type]

        group.transports[rank].answer = count  # type: ignore[method-assign]

    for rank in range(2):
        counted(rank)
    settings = negotiation.RoundSettings(cycle_seconds=0.2)
    lanes = [Lane(transport, range(2), settings) for transport in group.transports]
    calls = [
        lane.submit(AllReduceCall(tensors=(torch.ones(3),), op=ReductionOp.SUM), f"x{number}")
        for lane in lanes
        for number in range(20)
    ]
    assert all(call.future.result(20)[0].tolist() == [2, 2, 2] for call in calls)
    sent = {  # gathers of texts, one all-to-all and one all-gather; one by one they would be 40 and more
        number < 20 for number in counts
    }
    assert sent == {True}
    for lane in lanes:
        lane.close()


def test_a_joined_rank_counts_as_zeros_until_all_have_joined() -> None:
    def work(rank: int) -> tuple[list[float], int]:
        means = [hvd.allreduce(one(6.0), name=f"step {step}").item() for step in range(2 * rank)]
        return means, hvd.join()

    results = horovod(work, 3)
    assert results[1][0] == [4.0, 4.0]
    assert results[2][0] == [4.0, 4.0, 2.0, 2.0]
    assert {last for _, last in results} == {2}


def test_a_rank_may_join_before_its_last_call_is_performed() -> None:
    settings = negotiation.RoundSettings(cycle_seconds=0.2)  # the call and the join of rank 1 are in one round
    lanes = [Lane(transport, range(2), settings) for transport in SimulatedGroup(2).transports]
    first = lanes[0].join()
    call = lanes[1].submit(AllReduceCall(tensors=(torch.ones(3),), op=ReductionOp.SUM), "last")
    second = lanes[1].join()
    assert call.future.result(20)[0].tolist() == [1, 1, 1]
    assert (first.result(20), second.result(20)) == (1, 1)
    for lane in lanes:
        lane.close()


def test_after_a_join_unnamed_calls_match_again() -> None:
    def work(rank: int) -> list[float]:
        found = [hvd.allreduce(one(), op=hvd.Sum).item() for _ in range(rank)]
        hvd.join()
        return [*found, hvd.allreduce(one(), op=hvd.Sum).item()]

    assert horovod(work) == [[2.0], [1.0, 2.0]]


@pytest.mark.parametrize("call", ["allgather", "broadcast", "max"])
def test_other_calls_raise_while_a_rank_has_joined(call: str) -> None:
    def work(rank: int) -> int:
        if rank:
            with pytest.raises(hvd.HorovodInternalError, match="join"):
                {
                    "allgather": lambda: hvd.allgather(one()),
                    "broadcast": lambda: hvd.broadcast(one(), 1),
                    "max": lambda: hvd.allreduce(one(), op=hvd.Max),
                }[call]()
        return hvd.join()

    assert horovod(work) == [1, 1]


def test_a_lost_rank_fails_what_waits_and_what_comes() -> None:
    group = SimulatedGroup(2)
    lane = Lane(group.transports[0], range(2))
    waiting = lane.submit(BarrierCall())
    group.transports[1].close()
    with pytest.raises(HorovodInternalError, match="PeerLost"):
        waiting.future.result(20)
    with pytest.raises(HorovodInternalError, match="PeerLost"):
        lane.submit(BarrierCall())


def test_shutdown_fails_what_waits() -> None:
    lane = Lane(SimulatedGroup(2).transports[0], range(2))
    waiting = lane.submit(BarrierCall())
    threading.Thread(target=lane.close).start()
    with pytest.raises(HorovodInternalError):
        waiting.future.result(20)


def test_missing_ranks_are_named_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negotiation, "STALL_SECONDS", 0.0)
    with notices() as said:

        def work(rank: int) -> None:
            names = ("mine", "both") if rank == 0 else ("theirs", "both")
            handles = [hvd.allreduce_async(one(), name=name) for name in names[:1]]
            while rank == 0 and not said:
                pass
            if rank:
                while not said:
                    pass
            hvd.barrier()
            handles += [hvd.allreduce_async(one(), name="theirs" if rank == 0 else "mine")]
            for handle in handles:
                hvd.synchronize(handle)

        horovod(work)
    assert any("allreduce.mine" in each and "[1]" in each for each in said)


def test_parts_of_a_message_may_begin_at_any_byte() -> None:
    """As after a part of an odd number of bytes, in connections that send all parts of a payload as one."""
    numbers = torch.tensor([1, 2], dtype=torch.int32)
    message = torch.cat([torch.zeros(3, dtype=torch.uint8), as_bytes(numbers)])
    assert torch.equal(from_bytes(message[3:], torch.int32), numbers)
