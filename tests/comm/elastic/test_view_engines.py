"""View engines: a member's death at any moment is named, nothing hangs, and the next view has an engine of its own.

NCCL's stand-in takes its part, over real meshes on loopback; ranks are threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from support.stand_in_nccl import StandInNccl
from support.standalone_group import StandaloneGroup
from torch import Tensor

from gossamer import events
from gossamer.base.kernels.library import are_built
from gossamer.base.ops import AllGather, AllReduceMean
from gossamer.comm import communicator, device_wait
from gossamer.comm.communicator import Communicator
from gossamer.comm.elastic import view_engines
from gossamer.comm.elastic.view_engines import ViewEngine, ViewEngines
from gossamer.comm.mesh.device_transport import DeviceTransport
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.native_mesh import Mesh
from gossamer.errors import PeerLost

pytestmark = pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_wait, "GRACE_SECONDS", 0.05)


class Run:
    """Workers by their numbers, whose engines outlive views."""

    def __init__(self, workers: int, kind: type[ViewEngines] = ViewEngines) -> None:
        self.nccl = StandInNccl()
        self.engines = [kind(CPU, "127.0.0.1", self.nccl.form) for _ in range(workers)]

    def view(self, workers: int) -> View:
        return View(self, workers)


class View:
    """The first so many workers as a view: their meshes, and their engines once they have `formed`."""

    def __init__(self, run: Run, workers: int) -> None:
        self.run, self.group = run, StandaloneGroup(workers)
        self.engines: list[Any] = [None] * workers

    def form(self, rank: int) -> Any:
        self.engines[rank] = self.run.engines[rank].of(self.group.transports[rank])
        return self.engines[rank]

    def formed(self) -> View:
        self.group.all(self.form)
        return self

    def dies(self, rank: int) -> None:
        """Its process ends."""
        self.group.transports[rank].close()

    def mean(self, rank: int) -> Tensor:
        found: Tensor = self.engines[rank].answer(AllReduceMean(numbers(rank)))
        return found

    def lost(self, ranks: Sequence[int], call: Callable[[int], Any], then: Callable[[], object]) -> list[str]:
        """What each of them is told, where `then` happens while they are under way."""

        def told(rank: int) -> str:
            try:
                answer = call(rank)
            except PeerLost as lost:
                return str(lost)
            return f"an answer: {answer}"

        tickets = [self.group.pool.submit(told, rank) for rank in ranks]
        then()
        return [ticket.result(30) for ticket in tickets]

    def __enter__(self) -> View:
        return self

    def __exit__(self, *ending: object) -> None:
        self.group.__exit__(*ending)


def numbers(rank: int) -> Tensor:
    return torch.arange(6.0) * (rank + 1)


def mean_of(world: int) -> Tensor:
    return torch.arange(6.0) * (world + 1) / 2


def named(texts: Sequence[str], rank: int) -> bool:
    return all(f"rank {rank} is gone" in text for text in texts)


def check_right(view: View, world: int) -> None:
    assert None not in view.engines, "the members have no engine"
    assert all(torch.equal(found, mean_of(world)) for found in view.group.all(view.mean))


def test_means_and_gathers_of_all_go_between_devices_and_nothing_else() -> None:
    with Run(3).view(3).formed() as view:
        check_right(view, 3)
        out = torch.zeros(3, 2).t()
        found = view.group.all(
            lambda rank: view.engines[rank].answer(
                AllReduceMean(numbers(rank).view(2, 3), out if rank == 0 else torch.empty(2, 3))
            )
        )
        assert found[0] is out
        assert torch.equal(out, mean_of(3).view(2, 3))
        told = view.group.all(lambda rank: view.engines[rank].answer(AllGather((numbers(rank), torch.tensor([rank])))))
        assert [int(number) for _, number in told[1]] == [0, 1, 2]
        engine: ViewEngine = view.engines[0]
        assert engine.serves(AllGather((numbers(0),)), whole=True)
        assert not engine.serves(AllGather((numbers(0),)), whole=False)
        assert not engine.serves(AllReduceMean(torch.tensor([1])), whole=True)


def test_a_view_takes_the_faster_of_both_ways_as_it_was_timed() -> None:
    run = Run(2)
    with run.view(2) as view:
        view.group.transports = view.group.all(lambda rank: run.engines[rank].combine(view.group.transports[rank]))
        assert all(isinstance(each, DeviceTransport) for each in view.group.transports)
        ways = {Links.of(each.links).ways for each in view.group.transports}
        assert len(ways) == 1
        assert len(ways.pop()) == 2, "among all, by the engine and by the mesh"


def test_a_mesh_is_left_where_a_member_dies_while_an_engine_is_formed() -> None:
    run = Run(2)
    with run.view(2) as view:
        view.dies(1)
        with pytest.raises(PeerLost, match="rank 1"):
            run.engines[0].combine(view.group.transports[0])
        with pytest.raises(PeerLost):
            view.group.transports[0].peers.hung_up()


def dies_before(view: View) -> list[str]:
    view.dies(2)
    return view.lost([0, 1], view.mean, lambda: None)


def dies_within(view: View) -> list[str]:
    def then() -> None:
        for rank in (0, 1):
            assert view.run.nccl.groups[rank][-1].begun.wait(20)
        view.dies(2)

    return view.lost([0, 1], view.mean, then)


@pytest.mark.parametrize("dies", [dies_before, dies_within])
def test_a_peer_that_dies_before_an_operation_or_in_it_is_named(dies: Callable[[View], list[str]]) -> None:
    with Run(3).view(3).formed() as view:
        assert named(dies(view), 2)
        assert all(view.run.nccl.groups[rank][0].aborted.is_set() for rank in (0, 1))


@pytest.mark.parametrize("dies", [dies_before, dies_within])
def test_the_check_catches_who_does_not_ask_for_peers(
    dies: Callable[[View], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSAMER_TIMEOUT", "0.3")
    with Run(3).view(3).formed() as view, monkeypatch.context() as patch:
        patch.setattr(Mesh, "hung_up", lambda self: [])
        assert not named(dies(view), 2)


def test_what_a_member_did_before_it_died_counts() -> None:
    with Run(2).view(2).formed() as view:
        begun = view.engines[1].begin(AllReduceMean(numbers(1)))
        view.dies(1)
        assert torch.equal(view.mean(0), mean_of(2))
        assert begun is not None


def torn_off(view: View) -> list[str]:
    """The view is over, as another thread hears, while work is under way."""

    def then() -> None:
        assert view.run.nccl.groups[0][-1].begun.wait(20)
        view.engines[0].abort()

    return view.lost([0], view.mean, then)


def test_nothing_is_handed_out_of_an_engine_that_was_aborted() -> None:
    with Run(2).view(2).formed() as view:
        assert communicator.ABORTED in torn_off(view)[0]


def test_the_check_catches_numbers_of_one_that_was_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Communicator, "_refuse_aborted", lambda self: None)
    with Run(2).view(2).formed() as view:
        assert "nan" in torn_off(view)[0]


def test_a_peer_that_dies_while_an_engine_is_formed_is_named_and_what_comes_late_is_aborted() -> None:
    run = Run(3)
    waiting, late = threading.Semaphore(0), threading.Event()

    def before(rank: int) -> None:
        waiting.release()
        if rank == 2:
            assert late.wait(20)

    run.nccl.before = before
    with run.view(3) as view:

        def then() -> None:
            for _ in range(3):
                assert waiting.acquire(timeout=20)
            view.dies(2)

        texts = view.lost([0, 1, 2], view.form, then)
        assert named(texts[:2], 2)
        late.set()
        for _ in range(3):
            assert run.nccl.formed.acquire(timeout=20)
        for rank in (0, 1):
            assert run.nccl.groups[rank][0].aborted.wait(20), "nobody has it, and its kernels would stay"
        run.nccl.before = lambda rank: None
        with run.view(2).formed() as left:
            check_right(left, 2)


def survives_two(kind: type[ViewEngines] = ViewEngines) -> None:
    """Of four workers the last one dies, and then another; all others go on each time."""
    run = Run(4, kind)
    for world in (4, 3):
        with run.view(world).formed() as view:
            check_right(view, world)
            last = world - 1
            view.dies(last)
            assert named(view.lost(range(last), view.mean, lambda: None), last)
    with run.view(2).formed() as view:
        check_right(view, 2)
        assert len({id(group.incarnation) for group in run.nccl.groups[0]}) == 3, "an engine had two lives"


def ordered(run_log: Sequence[str]) -> bool:
    """Whether an engine is over before the next one begins."""
    return all(run_log[place - 1] == "aborted" for place, each in enumerate(run_log) if each == "forms" and place)


def test_two_losses_in_a_row() -> None:
    survives_two()


class OldKey(ViewEngines):
    """Meets where it has met before."""

    def _formed(self, mesh: Any, store: Callable[[], Any]) -> str:
        kept = self.__dict__.setdefault("kept", store())
        return super()._formed(mesh, lambda: kept)


def test_the_check_catches_who_meets_by_the_old_store() -> None:
    with pytest.raises(AssertionError, match="no engine"):
        survives_two(OldKey)


def regrouped(kind: type[ViewEngines]) -> None:
    """A view that is over though nobody has died: somebody came."""
    run = Run(2, kind)
    with run.view(2).formed() as view:
        check_right(view, 2)
        with run.view(2).formed() as again:
            check_right(again, 2)
    assert all(ordered(log) for log in run.nccl.logs.values()), "one was formed while another one stood"


def test_an_engine_is_aborted_before_the_next_one_is_formed() -> None:
    regrouped(ViewEngines)


class FormsFirst(ViewEngines):
    def _retired(self) -> None:
        """The one before is left as it is."""


class AbortsLast(ViewEngines):
    def of(self, mesh: Any) -> Any:
        before, self._now = self._now, None
        found = super().of(mesh)
        if before is not None:
            before.abort()
        return found


@pytest.mark.parametrize("kind", [FormsFirst, AbortsLast])
def test_the_check_catches_two_engines_at_once(kind: type[ViewEngines]) -> None:
    with pytest.raises(AssertionError, match="while another one stood"):
        regrouped(kind)


@pytest.fixture
def notices() -> Iterator[list[str]]:
    heard: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "notice", heard.append)
        yield heard


def test_where_one_member_cannot_have_an_engine_nobody_has_and_it_is_not_tried_again(notices: list[str]) -> None:
    run = Run(2)

    def refuses(rank: int) -> None:
        if rank == 1:
            raise RuntimeError("Duplicate GPU detected\nand more")

    run.nccl.before = refuses
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("support.stand_in_nccl.SECONDS", 0.2)
        with run.view(2).formed() as view:
            assert view.engines == [None, None]
    assert len(notices) == 1
    assert "no NCCL between the GPUs of this run" in notices[0]
    run.nccl.before = lambda rank: pytest.fail("it is tried again")
    with run.view(2).formed() as view:
        assert view.engines == [None, None]
    assert len(notices) == 1
    run.engines[1] = ViewEngines(CPU, "127.0.0.1", run.nccl.form)  # a newcomer, which has heard nothing of it
    with run.view(2).formed() as view:
        assert view.engines == [None, None]


def test_an_address_at_which_nobody_can_listen_leaves_the_mesh(notices: list[str]) -> None:
    run = Run(2)
    run.engines[0] = ViewEngines(CPU, "192.0.2.1", run.nccl.form)
    with pytest.MonkeyPatch.context() as patch:

        def fails(*_: object, **__: object) -> None:
            raise OSError("no such address")

        patch.setattr(view_engines, "listen_as", fails)
        with run.view(2).formed() as view:
            assert view.engines == [None, None]
    assert "no such address" in notices[0]


def test_a_slow_engine_is_given_up(notices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_engines, "PATIENCE", view_engines.PATIENCE / 300)
    run, over = Run(2), threading.Event()
    run.nccl.before = lambda rank: over.wait(20)
    with run.view(2).formed() as view:
        assert view.engines == [None, None]
    over.set()
    assert "none within 0.2 s" in notices[0]
