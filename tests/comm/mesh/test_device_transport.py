"""Device transport: each operation goes the way that is faster for it, alike on all ranks, and answers are the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from laws.laws import Group as Aggregating
from support.mesh_group import Group, same
from support.staged_group import stage

from gossamer.algorithms.collectives import DirectAllReduce
from gossamer.algorithms.compressors import TopK
from gossamer.algorithms.compressors.hierarchical import Hierarchical
from gossamer.base.kernels.library import are_built
from gossamer.base.layout import FlatTensors
from gossamer.base.op_semantics import answer_all
from gossamer.base.ops import AllGather, AllReduceMean, Coalesced, CollectiveOp, InGroup
from gossamer.base.runner import run_script
from gossamer.comm.mesh import device_transport
from gossamer.comm.mesh.collective_selector import prefer_collective
from gossamer.comm.mesh.device_transport import DeviceTransport, chooses, device_engine
from gossamer.comm.mesh.engine_selector import EngineSelector
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.transport import MeshTransport, mesh_transport
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import PeerLost

pytestmark = pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")

FAST, SLOW = (0.001, 0.002), (0.5, 0.6)
NODES = ("a", "a", "b", "b")
WITHIN, BETWEEN = ((0, 1), (2, 3)), ((0, 2), (1, 3))


class Engine:
    """A simulated engine that takes devices, and notes what it is asked."""

    takes_devices = True

    def __init__(self, inner: Any, asked: list[Any]) -> None:
        self.inner, self.asked = inner, asked
        self.rank, self.world, self.links = inner.rank, inner.world, ""
        self.peers: Any = None
        self.closed = 0

    def serves(self, op: CollectiveOp, whole: bool) -> bool:
        return True

    def watched_by(self, peers: Any) -> None:
        self.peers = peers

    def close(self) -> None:
        self.closed += 1

    def begin(self, op: CollectiveOp) -> Any:
        self.asked.append(op.names())
        # Sub-groups meet by themselves, as they do in a real engine
        if isinstance(op, InGroup):
            part = self.inner._group.__dict__.setdefault("met", {}).setdefault(
                op.ranks, SimulatedGroup(len(op.ranks), 10.0)
            )
            return part.transports[op.ranks.index(self.rank)].begin(op.op)
        return self.inner.begin(op)

    def answer(self, op: CollectiveOp) -> Any:
        return self.begin(op)()


@contextmanager
def ways(numbers: Sequence[Any], world: int = 4) -> Iterator[tuple[Group, list[list[Any]]]]:
    """A group whose ranks choose by these numbers, and what each rank's engine was asked."""
    with Group(world, DirectAllReduce()) as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_transport, "is_here", lambda tensors: False)
        devices = stage(group, pace=1.0)
        asked: list[list[Any]] = [[] for _ in devices]
        engines = [Engine(each, asked[rank]) for rank, each in enumerate(SimulatedGroup(world, 10.0).transports)]
        group.transports = [
            DeviceTransport(mesh, engine, lambda _: EngineSelector(tuple(numbers), NODES))
            for mesh, engine in zip(group.transports, engines, strict=True)
        ]
        yield group, asked


def group_of(rank: int, groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return next(each for each in groups if rank in each)


def whole(rank: int) -> torch.Tensor:
    return torch.arange(1000.0) * (rank + 1)


def test_within_a_node_by_the_engine_and_between_nodes_by_the_mesh() -> None:
    with ways([SLOW, FAST, FAST, SLOW]) as (group, asked):
        for groups in (WITHIN, BETWEEN):
            ops = [InGroup(group_of(rank, groups), AllReduceMean(whole(rank))) for rank in range(4)]
            found = group.answers(ops)
            assert all(map(torch.equal, found, answer_all(ops)))
            assert [len(each) for each in asked] == [1] * 4, "the mesh alone between nodes, the engine alone within"
        found = group.answers([AllGather((whole(rank),)) for rank in range(4)])
        assert same(found[0], [(whole(rank),) for rank in range(4)])
        assert [len(each) for each in asked] == [1] * 4


def mixed() -> None:
    """One sub-group lies within a node and the other two are single ranks of others, then something of all."""
    with ways([SLOW, FAST, FAST, SLOW]) as (group, asked):
        groups = ((0, 1), (2,), (3,))
        numbers = [InGroup(group_of(rank, groups), AllReduceMean(whole(rank))) for rank in range(4)]
        first = group.answers(numbers)
        assert [len(each) for each in asked] == [1] * 4
        assert all(map(torch.equal, first, answer_all(numbers)))
        assert len({mesh._next for mesh in group.meshes}) == 1, "ranks count operations differently"


def test_ranks_count_along_where_their_own_group_goes_by_the_engine() -> None:
    mixed()
    with ways([SLOW, FAST, FAST, SLOW]) as (group, asked):
        across = ((0, 1), (2, 3))
        # nodes a and b for the first group, and a group of two nodes beside it
        for transport in group.transports:
            transport._pick = lambda _: EngineSelector((SLOW, FAST, FAST, SLOW), ("a", "a", "b", "c"))
        ops = [InGroup(group_of(rank, across), AllReduceMean(whole(rank))) for rank in range(4)]
        assert all(map(torch.equal, group.answers(ops), answer_all(ops)))
        assert [len(each) for each in asked] == [1, 1, 0, 0]
        assert len({mesh._next for mesh in group.meshes}) == 1, "ranks count operations differently"
        last = [AllReduceMean(whole(rank)) for rank in range(4)]
        assert all(map(torch.equal, group.answers(last), answer_all(last)))


def test_the_check_catches_who_does_not_count_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MeshTransport, "pass_over", lambda self: None)
    with ways([SLOW, FAST, FAST, SLOW]) as (group, _):
        for transport in group.transports:
            transport._pick = lambda _: EngineSelector((SLOW, FAST, FAST, SLOW), ("a", "a", "b", "c"))
        group.answers([InGroup(group_of(rank, WITHIN), AllReduceMean(whole(rank))) for rank in range(4)])
        assert len({mesh._next for mesh in group.meshes}) == 2


def coalesced(monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[Any]], list[list[Any]]]:
    """Two small ones, a large one and a small one, asked together: what the engines and the meshes were asked."""
    by_mesh: list[list[Any]] = []
    begin = MeshTransport.begin
    monkeypatch.setattr(MeshTransport, "begin", lambda mesh, op: by_mesh.append(op.names()) or begin(mesh, op))
    with ways([SLOW, FAST, FAST, SLOW]) as (group, asked):
        for transport in group.transports:
            engine = transport._engine
            engine.serves = lambda op, whole: op.tensors()[0].numel() > 10
            transport._pick = lambda _: lambda nbytes, ranks: True
        sizes = (3, 2, 100, 1)
        ops = [Coalesced(tuple(AllGather((whole(rank)[:size],)) for size in sizes)) for rank in range(4)]
        found = group.answers(ops)
        for one, other in zip(found, answer_all(ops), strict=True):
            assert all(same(heard, expected) for heard, expected in zip(one, other, strict=True))
        return asked, by_mesh


def test_what_goes_by_the_mesh_of_several_is_asked_of_it_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, by_mesh = coalesced(monkeypatch)
    assert [len(each) for each in asked] == [1] * 4
    assert len(by_mesh) == 2 * 4, "the two before the large one, and the one after it, on each rank"


def test_the_mutant_that_asks_for_one_after_the_other_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceTransport, "_stays_on_mesh", lambda self, op, ranks: False)
    _, by_mesh = coalesced(monkeypatch)
    assert len(by_mesh) == 3 * 4


def test_a_collective_that_is_named_later_is_taken_and_so_is_the_engine() -> None:
    with ways([FAST, SLOW], world=2) as (group, asked):
        ops = [Coalesced((AllReduceMean(whole(rank)), AllGather((whole(rank),)))) for rank in range(2)]
        for wish, count in (("auto", 2), ("ring", 0), ("engine", 2)):
            for transport in group.transports:
                prefer_collective(transport, wish)
            found = group.answers(ops)
            assert torch.equal(found[1][0], answer_all(ops)[1][0])
            assert len(asked[0]) == len(asked[1]) == count
            asked[0].clear()
            asked[1].clear()


def test_texts_broadcasts_and_tensors_of_processors_go_by_the_mesh() -> None:
    with ways([FAST, SLOW], world=2) as (group, asked), pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_transport, "is_here", lambda tensors: True)
        assert group.all(lambda rank: group.transports[rank].all_gather_text(str(rank))) == [["0", "1"]] * 2
        filled = [whole(rank) for rank in range(2)]
        group.all(lambda rank: group.transports[rank].broadcast_([filled[rank]], 1))
        assert torch.equal(filled[0], whole(1))
        group.answers([AllReduceMean(whole(rank)) for rank in range(2)])
        assert asked == [[], []]


def test_the_links_of_a_run_bring_its_choice_back() -> None:
    with Group(2) as group:
        mesh = group.transports[0]
        mesh.links = Links.of(mesh.links.replace('"ways": []', '"ways": [[1.0, 2.0], [3.0, 4.0]]')).text
        chosen = DeviceTransport.of(mesh, Engine(group.engines[0], []), torch.device("cpu"), ("a", "a"))
        assert Links.of(chosen.links).ways == ((1.0, 2.0), (3.0, 4.0)), "what is known is not timed again"
        chosen.links = chosen.links.replace("[[1.0, 2.0], [3.0, 4.0]]", "[[9.0, 9.0], [1.0, 1.0]]")
        assert Links.of(chosen.links).ways == ((9.0, 9.0), (1.0, 1.0))
        chosen.links = Links.of(chosen.links).among([0, 1]).text  # of a run on processors
        assert Links.of(chosen.links).ways == ((9.0, 9.0), (1.0, 1.0))


def test_a_hierarchy_asks_the_engine_within_its_nodes_and_the_mesh_between_them() -> None:
    compressor = Hierarchical(TopK(density=0.25), per_node=2)
    aggregating = Aggregating(compressor, 4, dtype=torch.float32)
    gradients = aggregating.gradients()
    with ways([SLOW, FAST, FAST, SLOW]) as (group, asked):

        def act(rank: int) -> torch.Tensor:
            x = FlatTensors(gradients[rank].clone(), aggregating.layout)
            script = compressor.aggregate(x, aggregating.states[rank], aggregating.at(rank))
            return run_script(script, group.transports[rank]).result.mean

        found = group.all(act)
        assert {name for names in asked for each in names for name in each} == {"Among", "Exchange", "Gather"}
        assert [len(each) for each in asked] == [2] * 4, "scattered and gathered within the node, nothing else"
    for mine, theirs in zip(found, aggregating.aggregate(gradients), strict=True):
        assert torch.equal(mine, theirs.mean)


def test_what_the_engine_does_not_serve_goes_by_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    with ways([FAST, SLOW], world=2) as (group, asked):
        monkeypatch.setattr(Engine, "serves", lambda self, op, whole: whole and isinstance(op, AllReduceMean))
        means = group.answers([AllReduceMean(whole(rank)) for rank in range(2)])
        assert torch.equal(means[0], (whole(0) + whole(1)) / 2)
        found = group.answers([AllGather((whole(rank),)) for rank in range(2)])
        assert same(found[0], [(whole(rank),) for rank in range(2)])
        alone = [InGroup((rank,), AllReduceMean(whole(rank))) for rank in range(2)]
        assert all(map(torch.equal, group.answers(alone), answer_all(alone)))
        assert asked == [[{"Mean"}], [{"Mean"}]]


def test_the_engine_hears_of_peers_by_the_mesh_and_both_are_left_the_mesh_first() -> None:
    with ways([FAST, SLOW], world=2) as (group, _):
        for transport in group.transports:
            assert transport._engine.peers is transport._mesh.peers
        told = group.all(
            lambda rank: (
                group.transports[rank].deliver({1: torch.ones(3, dtype=torch.uint8)}, {})
                if rank == 0
                else group.transports[rank].deliver({}, {0: 3})
            )
        )
        assert told[1][0].tolist() == [1, 1, 1]
        first, second = group.transports
        first.close("the view is over")
        assert first._engine.closed == 1
        assert second._mesh.peers.hung_up()
        with pytest.raises(PeerLost, match="the view is over"):
            first._mesh.peers.hung_up()


# -- how a group comes to it ------------------------------------------------------------------------------------------


def made(kinds: Sequence[str], wish: str = "auto", takes: bool = True) -> list[Any]:
    """What ranks on these kinds of devices come to, where their devices are not there to be timed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_transport, "measured_ways", lambda *_: ((1.0, 1.0), (1.0, 1.0)))
        engines = [Engine(each, []) for each in SimulatedGroup(2, 10.0).transports]
        for engine in engines:
            engine.takes_devices = takes  # type: ignore[misc]
            engine.all_gather_text = engine.inner.all_gather_text  # type: ignore[attr-defined]
        with ThreadPoolExecutor(2) as pool:
            tickets = [
                pool.submit(mesh_transport, engine, "127.0.0.1", wish, None, torch.device(kind))  # type: ignore[arg-type]
                for engine, kind in zip(engines, kinds, strict=True)
            ]
            found = [ticket.result(20) for ticket in tickets]
        for each in found:
            each.close()
        return found


def kinds(found: Sequence[Any]) -> list[type]:
    return [type(each) for each in found]


def test_where_all_have_a_device_both_ways_are_there() -> None:
    assert kinds(made(["cuda", "cuda"])) == [DeviceTransport] * 2


def test_where_one_has_none_or_a_collective_is_named_or_the_engine_takes_none_all_is_staged() -> None:
    for found in (made(["cuda", "cpu"]), made(["cuda", "cuda"], "ring"), made(["cuda", "cuda"], takes=False)):
        assert kinds(found) == [MeshTransport] * 2
        assert all(each._staged.everything for each in found), "every rank stages, or chunks would be none to some"


def test_where_the_engine_is_asked_for_it_is_alone_and_on_processors_nothing_is_staged() -> None:
    assert kinds(made(["cuda", "cuda"], "engine")) == [Engine] * 2
    assert not any(each._staged.everything for each in made(["cpu", "cpu"]))


def test_there_is_a_choice_where_all_have_a_device_and_no_collective_is_named() -> None:
    assert chooses("auto", ("cuda", "cuda"))
    assert not chooses("ring", ("cuda", "cuda"))
    assert not chooses("auto", ("cuda", "cpu"))
    assert not chooses("auto", ())


def test_an_engine_that_does_not_say_takes_no_devices() -> None:
    assert device_engine(SimulatedGroup(1).transports[0]) is None
