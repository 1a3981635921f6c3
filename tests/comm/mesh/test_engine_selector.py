"""Engine selection: one rule on numbers that all ranks share, within a node and between nodes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.mesh_group import both

from gossamer.comm.mesh import engine_selector
from gossamer.comm.mesh.engine_selector import (
    LARGE_BYTES,
    SMALL_BYTES,
    TRIES,
    EngineSelector,
    measured_ways,
    nodes_of,
    seconds_of,
)
from gossamer.comm.mesh.link_measurement import Links

CPU = torch.device("cpu")
SLOW_ENGINE, FAST_MESH = (0.010, 0.020), (0.001, 0.100)  # few bytes by the mesh, many by the engine
NODES = ("a", "a", "b", "b")


def test_few_bytes_go_by_one_way_and_many_by_the_other() -> None:
    pick = EngineSelector((SLOW_ENGINE, FAST_MESH), NODES)
    everyone = (0, 1, 2, 3)
    assert not pick(SMALL_BYTES, everyone)
    assert pick(LARGE_BYTES, everyone)
    assert pick(100 * LARGE_BYTES, everyone)
    assert not pick(0, everyone)


def test_within_a_node_it_is_what_was_measured_there() -> None:
    engine_within, mesh_between = (0.001, 0.002), (0.001, 0.002)
    slower = (0.5, 0.6)
    pick = EngineSelector((slower, mesh_between, engine_within, slower), NODES)
    assert pick(LARGE_BYTES, (0, 1))
    assert pick(LARGE_BYTES, (2, 3))
    assert not pick(LARGE_BYTES, (0, 2))
    assert not pick(LARGE_BYTES, (0, 1, 2, 3))


def test_a_line_through_two_times_does_not_fall() -> None:
    assert seconds_of(SMALL_BYTES, (0.5, 0.1)) == seconds_of(LARGE_BYTES, (0.5, 0.1)) == 0.5
    assert seconds_of(LARGE_BYTES, (0.1, 0.5)) == pytest.approx(0.5)


def test_nodes_are_the_hosts_of_processes() -> None:
    assert nodes_of(["one 17 0", "one 18 1", "two 17 2"]) == ("one", "one", "two")


def measured(paces: list[float], nodes: tuple[str, ...] = ("a", "a")) -> list[Any]:
    """By clocks that go at a pace of their own at each rank: the ways that each comes to."""

    def act(engine: Any) -> Any:
        clock = itertools.count()
        return measured_ways(engine, engine, CPU, nodes, lambda: next(clock) * paces[engine.rank])

    return both(act)


def check_shared() -> None:
    first, second = measured([1.0, 3.0])
    assert first == second, "ranks would decide differently"
    assert first == ((3.0, 3.0), (3.0, 3.0))


def test_all_ranks_have_the_slowest_ranks_numbers() -> None:
    check_shared()


def test_the_check_catches_ranks_that_keep_their_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_selector, "max", lambda times: next(iter(times)), raising=False)
    with pytest.raises(AssertionError):
        check_shared()


def test_of_several_tries_the_fastest_counts() -> None:
    class Way:
        rank, world = 0, 1

        def answer(self, op: Any) -> None: ...

        def all_gather_text(self, text: str) -> list[str]:
            return [text]

    moments = itertools.accumulate(itertools.cycle([0.0, 5.0, 0.0, 1.0, 0.0, 9.0]))
    way: Any = Way()
    assert TRIES == 3
    assert measured_ways(way, way, CPU, ("a",), lambda: next(moments)) == ((1.0, 1.0), (1.0, 1.0))


def test_what_was_measured_is_among_the_links_that_a_resumed_run_is_given() -> None:
    links = Links.alike(((0.0,) * 2,) * 2, 1e9)
    kept = Links.of(links.text.replace('"ways": []', '"ways": [[1.0, 2.0], [3.0, 4.0]]'))
    assert kept.ways == ((1.0, 2.0), (3.0, 4.0))
    assert Links.of(kept.text) == kept
    assert kept.among([0]).ways == (), "of another group"
