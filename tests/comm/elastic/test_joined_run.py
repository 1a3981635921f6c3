"""Joined run: which views have an engine between devices, and what survivors of one know of their links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.mesh_group import keys_of
from support.standalone_group import connected

from gossamer.base.kernels.library import library
from gossamer.comm.elastic.joined_run import JoinedRun
from gossamer.comm.membership import Member, View
from gossamer.comm.mesh.link_measurement import Links

WAYS = ((0.1, 0.2), (0.3, 0.4))


class Lone(JoinedRun):
    """A member without a coordinator, whose connections are there."""

    def __init__(self, number: int, sockets: Any = None, encrypts: bool = False) -> None:
        self.agent: Any = SimpleNamespace(number=number)
        self._listener: Any = SimpleNamespace(meet=lambda *_: sockets)
        self._token, self._seconds, self._over, self._measured = b"", 20.0, -1, None
        self._encrypts = encrypts

    def _keys(self, view: View, rank: int, sockets: Any) -> Any:
        return keys_of(rank, sockets) if self._encrypts else None


def beside(kinds: Sequence[str], wish: str = "auto", encrypts: bool = False) -> set[bool]:
    """Whether members that compute on these kinds of devices form an engine beside their mesh."""
    ends = connected(len(kinds))
    members = tuple(Member(number=10 + rank, host="here", port=1) for rank in range(len(kinds)))
    view = View(number=2, members=members, newcomers=frozenset(), secret=bytes(32))

    def connect(rank: int) -> bool:
        asked: list[Any] = []

        def forms(mesh: Any) -> Any:
            asked.append(mesh)
            return mesh

        run = Lone(10 + rank, ends[rank], encrypts)
        engines: Any = SimpleNamespace(beside=forms)
        group = run._connect(view, wish, torch.device(kinds[rank]), engines)
        group.close()
        return bool(asked)

    with ThreadPoolExecutor(len(kinds)) as pool:
        return set(pool.map(connect, range(len(kinds))))


@pytest.mark.skipif(library() is None, reason="the compiled loops are not there")
@pytest.mark.parametrize(
    ("asked", "forms"),
    [
        ({"kinds": ["cuda", "cuda"]}, True),
        ({"kinds": ["cuda", "cpu"]}, False),
        ({"kinds": ["cpu", "cpu"]}, False),
        ({"kinds": ["cuda"]}, False),
        ({"kinds": ["cuda", "cuda"], "wish": "ring"}, False),
        ({"kinds": ["cuda", "cuda"], "encrypts": True}, False),
    ],
)
def test_where_all_have_a_device_and_nothing_else_is_asked_for_an_engine_is_formed(
    asked: Mapping[str, Any], forms: bool
) -> None:
    assert beside(**asked) == {forms}


def test_survivors_choose_between_devices_and_hosts_by_what_was_timed_before() -> None:
    run = Lone(1)
    assert run._known((1, 2)) is None
    run._measured = (1, 2, 3), replace(Links.alike(((0.0,) * 3,) * 3, 1e9), ways=WAYS)
    known = run._known((1, 3))
    assert known is not None
    assert (len(known.round_trips), known.ways) == (2, WAYS)
    assert run._known((1, 4)) is None


@pytest.mark.parametrize("began", [1, 2, 5])
def test_a_newcomer_has_the_size_with_which_the_run_began(began: int) -> None:
    run = Lone(9)
    run.first, run.agent.began = None, began
    assert (run.rank, run.size, run.joins) == (began - 1, began, True)
    members = tuple(Member(number=number, host="here", port=1) for number in (8, 9, 7))
    run.first = View(number=1, members=members, newcomers=frozenset(), secret=bytes(32))
    assert (run.rank, run.size, run.joins) == (1, 3, False)
