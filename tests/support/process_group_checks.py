"""What real workers check about ops, compressors and strategies over Gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from laws.laws import LAYOUT, Group
from laws.subjects import EXACT, ROUNDED
from support.real_worker import same_everywhere, world
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gossamer
from gossamer.algorithms.compressors import Compressor, Dense, PowerSGD, TopK
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.op_semantics import answer_all
from gossamer.base.ops import AllGather, AllReduceMean, AllToAll, CollectiveOp, NeighborAllGather
from gossamer.base.runner import run_script
from gossamer.base.transport import Transport
from gossamer.comm.process_group import ProcessGroupTransport
from gossamer.train.checkpoint import digest


def compressors_over_gloo() -> None:
    """The same aggregation over Gloo and simulated: the same bits, except for the order of float sums beyond two.

    Two workers compare every third, four, nightly, all of them.
    """
    transport = ProcessGroupTransport()
    for compressor in (EXACT + ROUNDED)[:: 3 if world.size == 2 else 1]:
        _compare(compressor, False, transport)
    _compare(Dense(), True, transport)  # whole numbers: the order of their sums is all the same
    transport.close()


def _compare(compressor: Compressor, whole: bool, transport: ProcessGroupTransport) -> None:
    group = Group(compressor, world.size, dtype=torch.float32)
    for _ in range(2):
        gradients = [(x * 10).round() * world.size if whole else x for x in group.gradients()]
        mine = FlatTensors(gradients[world.rank].clone(), LAYOUT)
        script = compressor.aggregate(mine, group.states[world.rank], group.at(world.rank), mine.flat)
        performed = run_script(script, transport)
        expected = group.aggregate(gradients)[world.rank]
        mean = performed.result.mean
        same_everywhere(mean, transport)
        if world.size == 2 or (whole and compressor == Dense()):
            assert torch.equal(mean, expected.mean.float()), f"{compressor} over Gloo gave other bits"
        else:
            torch.testing.assert_close(mean, expected.mean.float(), atol=1e-4, rtol=1e-4)
        if world.size > 2:
            group.states[world.rank] = performed.result.next_state


def words_over_gloo() -> None:
    """Every op, with odd sizes, several dtypes and empty tensors, answered as the simulation answers it."""
    transport = ProcessGroupTransport()
    n = world.size

    def payload(seed: int) -> tuple[Tensor, ...]:
        make = torch.Generator().manual_seed(seed)
        return (
            torch.randint(-9, 9, (7,), generator=make, dtype=torch.int8),
            torch.randn(3, 5, generator=make),
            torch.zeros(0, dtype=torch.int64),
            torch.randint(0, 2**40, (2,), generator=make),
        )

    ring = tuple((peer % n, 1 / 3) for peer in (world.rank - 1, world.rank, world.rank + 1))
    saying: list[Callable[[int], CollectiveOp]] = [
        lambda rank: AllReduceMean(torch.arange(11.0) * rank * n),
        lambda rank: AllReduceMean((torch.arange(13.0) + rank).bfloat16()),
        lambda rank: AllReduceMean(torch.full((5,), 30_000.0).half()),
        lambda rank: AllGather(payload(rank)),
        lambda rank: AllToAll(tuple((*payload(10 * rank + peer), torch.ones(peer)) for peer in range(n))),
    ]
    for say in saying:
        heard = transport.answer(say(world.rank))
        expected = answer_all([say(rank) for rank in range(n)])[world.rank]
        _equal(heard, expected)
    heard = transport.answer(NeighborAllGather(payload(world.rank), ring))
    _equal(heard, [payload(peer) for peer, _ in ring])
    assert transport.all_gather_text("x" * world.rank) == ["x" * rank for rank in range(n)]
    transport.close()


def parts_over_gloo() -> None:
    """Pairs of neighbours talk among themselves, in their own order, between ops of all; and parameters of sites."""
    whole = ProcessGroupTransport()
    part = whole.part(2)
    first = world.rank - world.rank % 2
    assert (part.rank, part.world) == (world.rank % 2, 2)
    for turn in range(3):
        say = [torch.arange(5.0) * (first + peer) + turn for peer in range(2)]
        for _ in range(1 + first):
            _equal(
                part.answer(AllReduceMean(say[part.rank].clone())),
                answer_all([AllReduceMean(x) for x in say])[part.rank],
            )
        _equal(part.answer(AllGather((say[part.rank],))), [(x,) for x in say])
        assert whole.all_gather_text(str(world.rank)) == [str(rank) for rank in range(world.size)]
        sent = [AllToAll(tuple((torch.tensor([first + peer, other]),) for other in range(2))) for peer in range(2)]
        _equal(part.answer(sent[part.rank]), answer_all(sent)[part.rank])
        _equal(part.answer(NeighborAllGather((say[part.rank],), ((1 - part.rank, 1.0),))), [(say[1 - part.rank],)])
    told = torch.tensor([float(world.rank)])
    part.broadcast_([told], source=1)
    assert told.item() == first + 1
    assert part.all_gather_text("x" * world.rank) == ["x" * first, "x" * (first + 1)]
    whole.close()


def sites_over_gloo() -> None:
    """Local steps, with gradients averaged inside each pair of workers and parameters among all."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    transport = ProcessGroupTransport()
    with gossamer.attach(model, optimizer, "LocalSGD(3, per_site=2) + TopK(0.5)") as session:
        make = torch.Generator().manual_seed(world.rank)
        for step in range(7):
            optimizer.zero_grad()
            mse_loss(model(torch.randn(4, 6, generator=make)), torch.zeros(4, 3)).backward()
            optimizer.step()
            digests = transport.all_gather_text(digest(model.parameters()))
            assert len(set(digests)) == (1 if step % 3 == 2 else world.size // 2), (step, digests)
            assert all(digests[rank] == digests[rank + 1] for rank in range(0, world.size, 2))
        with session.averaged_parameters(model):
            same_everywhere(torch.cat([p.detach().flatten() for p in model.parameters()]), transport)
    transport.close()


def turns_over_gloo() -> None:
    """Fragments that travel while training goes on, also for ranks that have run out of data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    transport = ProcessGroupTransport()
    with gossamer.attach(model, optimizer, "DiLoCo(4, fragments=2, delay=2, mix=0.5) + Int8()") as session:
        make = torch.Generator().manual_seed(world.rank)
        with session.epoch():
            for _ in range(12 if world.rank else 7):
                optimizer.zero_grad()
                mse_loss(model(torch.randn(4, 6, generator=make)), torch.zeros(4, 3)).backward()
                optimizer.step()
        with session.averaged_parameters(model):
            same_everywhere(torch.cat([p.detach().flatten() for p in model.parameters()]), transport)
        assert len(set(transport.all_gather_text(str(session.steps)))) == 1
    transport.close()


def _equal(heard: Any, expected: Any) -> None:
    if isinstance(heard, Tensor):
        assert torch.equal(heard, expected), (heard, expected)
        assert torch.isfinite(heard.float()).all()
        return
    assert len(heard) == len(expected)
    for mine, theirs in zip(heard, expected, strict=True):
        _equal(mine, theirs)


def interface_bytes() -> int:
    """Bytes sent over loopback so far, as the kernel of this namespace counts them."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    raise AssertionError("no loopback interface")


def retransmitted() -> int:
    """Segments that this namespace's kernel has sent again, as it may where a process does not get the processor."""
    names, values = [
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    ]
    return int(values[names.index("RetransSegs")])


def interface_share(compressor: Compressor, transport: Transport, layout: Layout) -> tuple[float, int, int]:
    """Bytes of five aggregations that all ranks have accounted, those on the interface, and segments sent twice."""
    group = Group(compressor, world.size, dtype=torch.float32, layout=layout)
    x = FlatTensors(group.gradients()[world.rank], layout)
    transport.all_gather_text("everyone is silent")
    before, repeated = interface_bytes(), retransmitted()
    transport.all_gather_text("everyone has looked")
    accounted = 0.0
    for _ in range(5):
        script = compressor.aggregate(x, group.states[world.rank], group.at(world.rank))
        accounted += run_script(script, transport).bytes_sent
    everyone = sum(map(float, transport.all_gather_text(str(accounted))))
    counted, again = interface_bytes() - before, retransmitted() - repeated
    found = transport.all_gather_text(str(again))  # all look before anyone goes on, and repeat it together
    return everyone, counted, sum(map(int, found))


def bytes_on_the_interface() -> None:
    """What is accounted agrees with the kernel's counter, in a namespace where nothing else is sent, nor sent twice."""
    layout = Layout.of({"matrix": (1000, 1500), "bias": (1500,), "kernel": (64, 32, 3, 3)})
    transport = ProcessGroupTransport()
    for compressor in (Dense(), Dense(dtype="bfloat16"), TopK(density=0.02), Int8(), PowerSGD(rank=8)):
        for _ in range(5):
            everyone, counted, again = interface_share(compressor, transport, layout)
            if not again:
                break
        assert everyone <= counted, f"{compressor}: {everyone} accounted, only {counted} on the interface"
        assert counted <= 1.03 * everyone + 60_000, f"{compressor}: {everyone} accounted, {counted} on the interface"
    transport.close()
