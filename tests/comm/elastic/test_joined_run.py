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

from gossamer.base.kernels.library import are_built
from gossamer.comm.elastic import joined_run as module
from gossamer.comm.elastic.joined_run import JoinedRun
from gossamer.comm.membership import Member, View
from gossamer.comm.mesh.collective_selector import CollectivePrices
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.standalone import OwnRoutes
from gossamer.errors import PeerLost

WAYS = ((0.1, 0.2), (0.3, 0.4))


class Lone(JoinedRun):
    """A member without a coordinator, whose connections are there."""

    def __init__(
        self,
        number: int,
        sockets: Any = None,
        encrypts: bool = False,
        relays: bool = False,
        seals: bool = False,
    ) -> None:
        def meet(*given: Any, relayed: dict[int, int]) -> Any:
            relayed.update(self.by_relay)
            if relays or seals:
                given[-1].update(keys_of(number - 10, sockets))
            return sockets

        self.by_relay: dict[int, int] = {}
        self.agent: Any = SimpleNamespace(
            number=number, relay=relays, seal=relays or seals, servers="", coordinator=("127.0.0.1", 9)
        )
        self._listener: Any = SimpleNamespace(meet=meet)
        self._token, self._seconds, self._over, self._measured = b"", 20.0, -1, None
        self._encrypts, self._prices, self._connecting = encrypts, CollectivePrices(), {}

    def _keys(self, view: View, rank: int, sockets: Any) -> Any:
        return keys_of(rank, sockets) if self._encrypts else None


def combine(kinds: Sequence[str], wish: str = "auto", **options: bool) -> set[bool]:
    """Whether members that compute on these kinds of devices form an engine beside their mesh."""
    ends = connected(len(kinds))
    members = tuple(Member(number=10 + rank, host="here", port=1) for rank in range(len(kinds)))
    view = View(number=2, members=members, newcomers=frozenset(), secret=bytes(32))

    def connect(rank: int) -> bool:
        asked: list[Any] = []

        def forms(mesh: Any) -> Any:
            asked.append(mesh)
            return mesh

        run = Lone(10 + rank, ends[rank], **options)
        engines: Any = SimpleNamespace(combine=forms)
        group = run._connect(view, wish, torch.device(kinds[rank]), engines)
        group.close()
        return bool(asked)

    with ThreadPoolExecutor(len(kinds)) as pool:
        return set(pool.map(connect, range(len(kinds))))


@pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")
@pytest.mark.parametrize(
    ("asked", "forms"),
    [
        ({"kinds": ["cuda", "cuda"]}, True),
        ({"kinds": ["cuda", "cpu"]}, False),
        ({"kinds": ["cpu", "cpu"]}, False),
        ({"kinds": ["cuda"]}, False),
        ({"kinds": ["cuda", "cuda"], "wish": "ring"}, False),
        ({"kinds": ["cuda", "cuda"], "encrypts": True}, False),
        ({"kinds": ["cuda", "cuda"], "relays": True}, False),  # all connections are sealed then
        ({"kinds": ["cuda", "cuda"], "seals": True}, False),
    ],
)
def test_where_all_have_a_device_and_nothing_else_is_asked_for_an_engine_is_formed(
    asked: Mapping[str, Any], forms: bool
) -> None:
    assert combine(**asked) == {forms}


@pytest.mark.skipif(not are_built(), reason="the compiled loops are missing")
@pytest.mark.parametrize("options", [{"relays": True}, {"seals": True}, {"encrypts": True}, {}], ids=str)
def test_connections_carry_no_readable_tensors_if_the_run_seals_them(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    real = module.standalone_mesh

    def noted(*args: Any, **named: Any) -> Any:
        made.append(named["keys"] is not None)
        return real(*args, **named)

    monkeypatch.setattr(module, "standalone_mesh", noted)
    combine(["cpu", "cpu"], **options)
    assert made == [bool(options)] * 2


@pytest.mark.parametrize(("variable", "here"), [("", None), ("7", 7)])
def test_the_mesh_of_a_view_knows_the_relays_of_its_connections(
    variable: str, here: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: Any, routes: OwnRoutes, **named: Any) -> Any:
        found.append(routes)
        raise PeerLost("enough was seen")

    found: list[OwnRoutes] = []
    monkeypatch.setenv("GOSSAMER_RELAY", variable)
    monkeypatch.setattr(module, "standalone_mesh", made)
    members = tuple(Member(number=number, host="here", port=1) for number in (10, 11))
    run, engines = Lone(10, [None, None]), None
    run.by_relay = {1: 7}
    view = View(number=2, members=members, newcomers=frozenset(), secret=bytes(32))
    with pytest.raises(PeerLost, match="enough was seen"):
        run._connect(view, "auto", torch.device("cpu"), engines)  # type: ignore[arg-type]
    assert found == [OwnRoutes(here, {1: 7})]


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


def test_with_servers_newcomers_share_the_parts_of_the_data_of_all_first_workers() -> None:
    ranks = set()
    for number in range(9, 18):
        run = Lone(number)
        run.first, run.agent.began, run.agent.servers = None, 3, "127.0.0.1:1"
        ranks.add(run.rank)
    assert ranks == {0, 1, 2}
