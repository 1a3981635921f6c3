"""Intra-op thread count: the library's threads use as many as torch.set_num_threads says in the caller's thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from gossamer.base.kernels.library import Count, Function, KernelsError
from gossamer.base.kernels.threads import count_of_caller
from gossamer.base.peer_ops import Await, PeerOp, PeerScript
from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.comm.runtime.peer_thread import PeerThread
from gossamer.errors import PeerLost

COUNT, LATER = 3, 5
X = torch.ones(256, 256)

pytestmark = pytest.mark.skipif(
    "backend: OpenMP" not in torch.__config__.parallel_info() or not os.path.isdir("/proc/self/task"),
    reason="threads of another kind, or a system that does not list them",
)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(COUNT)
    yield
    torch.set_num_threads(before)


def running() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def used_for_a_product() -> int:
    """Threads that take part in the calling thread's matrix products: those that the first one makes, and it itself."""
    before = running()
    torch.mm(X, X, out=torch.empty_like(X))  # and nothing else, which would ask torch for its count
    return len(running() - before) + 1


def elsewhere(action: Callable[[], Any]) -> Any:
    """Let another thread do it."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(action()))
    thread.start()
    thread.join(30)
    return results[0]


class Answering:
    """An endpoint where every operation is a thing to do meanwhile, in the caller's thread."""

    def __init__(self) -> None:
        self.asked, self.answered = threading.Event(), threading.Event()

    def answer(self, op: PeerOp) -> None:
        self.asked.set()
        assert self.answered.wait(30)
        if op.until is not None:  # type: ignore[union-attr]
            raise PeerLost("as asked")


def test_torch_does_not_hand_its_count_to_a_new_thread() -> None:
    """If this fails, torch does by itself what this module is for."""
    torch.set_num_threads(2 * torch.get_num_threads())
    assert elsewhere(used_for_a_product) != torch.get_num_threads()


def test_the_communication_thread_computes_with_as_many_threads_as_the_caller() -> None:
    comm_thread = CommThread([torch.device("cpu")])
    sibling = comm_thread.sibling()
    assert comm_thread.submit(used_for_a_product).wait() == COUNT
    assert sibling.submit(used_for_a_product).wait() == COUNT
    comm_thread.close()


def test_the_communication_thread_follows_the_caller() -> None:
    comm_thread = CommThread([torch.device("cpu")])
    assert comm_thread.submit(torch.get_num_threads).wait() == COUNT
    for count in (LATER, 1):
        torch.set_num_threads(count)
        assert comm_thread.submit(torch.get_num_threads).wait() == count
    comm_thread.close()


def test_compiled_loops_use_as_many_unless_the_variable_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def sharing_of_a_new_caller() -> int:
        comm_thread = CommThread([torch.device("cpu")])
        count = comm_thread.submit(sharing).wait()
        comm_thread.close()
        return count

    monkeypatch.delenv("GOSSAMER_THREADS", raising=False)
    assert elsewhere(sharing_of_a_new_caller) == COUNT
    monkeypatch.setenv("GOSSAMER_THREADS", "2")
    assert elsewhere(sharing_of_a_new_caller) == 2


def sharing() -> int:
    """How many threads share the work of the calling thread's compiled loops."""
    count = Function("gossamer_use_threads", Count)(1)
    Function("gossamer_use_threads", Count)(count)
    return count


def test_the_caller_hears_of_a_count_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_THREADS", "abc")
    with pytest.raises(KernelsError, match=r"GOSSAMER_THREADS.*abc"):
        elsewhere_raising(lambda: CommThread([torch.device("cpu")]))


def elsewhere_raising(action: Callable[[], Any]) -> Any:
    """As `elsewhere`; what is raised there is raised here."""

    def caught() -> Any:
        try:
            return action()
        except KernelsError as error:
            return error

    result = elsewhere(caught)
    if isinstance(result, KernelsError):
        raise result
    return result


def test_what_another_thread_counts_reports_nothing() -> None:
    """A device's autograd thread submits jobs, too, and never hears of changes."""
    comm_thread = CommThread([torch.device("cpu")])
    torch.set_num_threads(LATER)
    comm_thread.submit(torch.get_num_threads).wait()

    def with_a_count_of_its_own() -> int:
        torch.set_num_threads(COUNT + 1)
        return comm_thread.submit(torch.get_num_threads).wait()

    assert elsewhere(with_a_count_of_its_own) == LATER
    assert torch.get_num_threads() == LATER
    comm_thread.close()


@pytest.mark.parametrize("until", [None, 1.0])
def test_a_peer_thread_begins_with_the_callers_count_and_follows_it(until: float | None) -> None:
    endpoint = Answering()

    def script() -> PeerScript:
        first = used_for_a_product()
        with suppress(PeerLost):
            yield Await(until=until)
        return first, torch.get_num_threads()

    thread = PeerThread(script(), endpoint)
    assert endpoint.asked.wait(30)
    torch.set_num_threads(LATER)
    count_of_caller()  # as whatever the caller asks of the library next does
    endpoint.answered.set()
    assert thread.wait(30) == (COUNT, LATER)


def test_a_thread_made_by_a_peer_thread_keeps_to_the_same_caller() -> None:
    endpoint = Answering()
    inner = Answering()
    inner.answered.set()
    endpoint.answered.set()

    def innermost() -> PeerScript:
        yield Await()
        return torch.get_num_threads(), count_of_caller()

    def script() -> PeerScript:
        yield Await()
        return PeerThread(innermost(), inner)

    assert PeerThread(script(), endpoint).wait(30).wait(30) == (COUNT, count_of_caller())
