"""Communicator: death before, in and after an operation ends it with the rank's name, and no number is handed out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import pytest
from torch.distributed import DistBackendError

from gossamer.comm.communicator import ABORTED, Communicator
from gossamer.comm.device_wait import DeviceWait
from gossamer.errors import PeerLost


class Scene:
    """A communicator on a clock of its own, with things that happen at moments."""

    def __init__(self, kind: type[Communicator] = Communicator, gone_at: float = float("inf")) -> None:
        self.now, self.gone_at, self.aborted = 0.0, gone_at, 0
        self.plan: dict[float, Callable[[], object]] = {}
        self.communicator = kind(self.abort, DeviceWait(self, lambda: self.now, self.sleep), 60.0)

    def abort(self) -> None:
        self.aborted += 1

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 200, "it waits for ever"
        for moment in [each for each in self.plan if each <= self.now]:
            self.plan.pop(moment)()

    def hung_up(self) -> bool:
        return self.now >= self.gone_at

    def break_off(self, why: str) -> NoReturn:
        raise PeerLost("rank 3 is gone" if self.hung_up() else why)

    def work(self, done_at: float = float("inf"), failure: Exception | None = None) -> Work:
        return Work(self, done_at, failure)


class Work:
    """Done at a moment, or once its communicator is aborted, as NCCL's is."""

    def __init__(self, scene: Scene, done_at: float, failure: Exception | None) -> None:
        self.scene, self.done_at, self.failure, self.waited = scene, done_at, failure, 0

    def is_completed(self) -> bool:
        return self.scene.now >= self.done_at or self.scene.aborted > 0

    def wait(self, timeout: timedelta) -> None:
        self.waited += 1
        if self.failure is not None:
            raise self.failure


def started() -> Any:
    raise AssertionError("work was begun with a communicator that is aborted")


def test_work_is_finished_when_all_of_it_is_done() -> None:
    scene = Scene()
    works = [scene.work(1.0), scene.work(2.0)]
    scene.communicator.finish(works)
    assert scene.now >= 2.0
    assert [each.waited for each in works] == [1, 1]
    assert scene.communicator.begin(lambda: 7) == 7
    assert scene.aborted == 0


@pytest.mark.parametrize("gone_at", [0.0, 5.0])
def test_a_peer_that_is_gone_before_or_in_it_is_named_and_the_communicator_aborted_once(gone_at: float) -> None:
    scene = Scene(gone_at=gone_at)
    work = scene.work()
    for _ in range(2):
        with pytest.raises(PeerLost, match="rank 3 is gone"):
            scene.communicator.finish([work])
    assert scene.now < gone_at + 2.0
    assert (scene.aborted, work.waited) == (1, 0)
    with pytest.raises(PeerLost, match="rank 3 is gone"):
        scene.communicator.begin(started)


def test_what_the_engine_says_first_names_the_rank_too() -> None:
    failure = DistBackendError("NCCL communicator was aborted on rank 0\nremote process exited")
    scene = Scene(gone_at=1.5)
    with pytest.raises(PeerLost, match="rank 3 is gone"):
        scene.communicator.finish([scene.work(1.0, failure)])
    scene = Scene()
    with pytest.raises(PeerLost, match=r"aborted on rank 0$"):
        scene.communicator.finish([scene.work(1.0, failure)])
    assert scene.aborted == 1

    def begins() -> Any:
        raise failure

    scene = Scene()
    with pytest.raises(PeerLost, match=r"aborted on rank 0$"):
        scene.communicator.begin(begins)
    assert scene.aborted == 1


def test_errors_of_the_device_are_no_losses() -> None:
    scene = Scene()
    with pytest.raises(RuntimeError, match="CUDA error"):
        scene.communicator.finish([scene.work(0.0, RuntimeError("CUDA error: an illegal memory access"))])


def test_peers_that_say_nothing_are_not_waited_for_forever() -> None:
    scene = Scene()
    with pytest.raises(PeerLost, match=r"not complete within 60 s.*GOSSAMER_TIMEOUT=120"):
        scene.communicator.finish([scene.work()])
    assert scene.aborted == 1


def check_nothing_of_an_aborted_one(kind: type[Communicator]) -> None:
    scene = Scene(kind)
    work = scene.work()
    scene.plan[3.0] = scene.communicator.abort  # another thread hears that the view is over
    with pytest.raises(PeerLost, match=ABORTED):
        scene.communicator.finish([work])
    assert work.waited == 0


def test_work_that_ended_since_it_was_aborted_is_not_handed_out() -> None:
    check_nothing_of_an_aborted_one(Communicator)


def test_the_check_catches_one_that_takes_what_is_done_for_right() -> None:
    class Trusting(Communicator):
        def _refuse_aborted(self) -> None:
            """Whatever is done is right."""

    with pytest.raises(BaseException, match="DID NOT RAISE"):
        check_nothing_of_an_aborted_one(Trusting)


def test_aborting_is_over_for_whoever_asks_second_too() -> None:
    began, may_end, over = threading.Event(), threading.Event(), threading.Event()

    def abort() -> None:
        began.set()
        assert may_end.wait(20)
        over.set()

    communicator = Communicator(abort, DeviceWait(Scene()), 60.0)
    first = threading.Thread(target=communicator.abort)
    first.start()
    assert began.wait(20)
    assert communicator.aborted
    ended: list[bool] = []

    def again() -> None:
        communicator.abort()
        ended.append(over.is_set())

    second = threading.Thread(target=again)
    second.start()
    may_end.set()
    first.join(20)
    second.join(20)
    assert ended == [True]
