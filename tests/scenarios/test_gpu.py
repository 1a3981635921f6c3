"""What only a GPU shows: waits of the training thread, streams, recorded graphs, and peak memory.

Rank 0 trains on the GPU, rank 1 on the CPU, in one process: two ranks on one GPU would wait for each other on the one
thread that autograd has for it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from benchmarks.host_calls import COMMUNICATION, RECIPES, HostBoundary, run_both
from support.virtual_workers import in_threads
from torch import nn

from gossamer.algorithms.compressors import Int8
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import LoopError
from gossamer.train.session.session import Session
from gossamer.train.synchronizers.gradients import GradientSynchronizer
from gossamer.train.world_state import WorldState

pytestmark = pytest.mark.gpu
WAITED = "called a synchronizing CUDA operation"


def gpu() -> torch.device:
    return torch.device("cuda", 0)


@contextmanager
def waits() -> Iterator[list[str]]:
    """Names of the threads that waited for the GPU within the block. The mode is the whole process's, and the
    communication thread may wait, so waits are told as warnings, by thread, and not raised."""
    found: list[str] = []

    def note(message: Any, *_: Any, **__: Any) -> None:
        if WAITED in str(message):
            found.append(threading.current_thread().name)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def waiting_threads(recipe: str) -> list[str]:
    found: list[str] = []

    def count(work: Callable[[], None]) -> None:
        with waits() as seen:
            work()
        found.extend(seen)

    run_both(recipe, gpu(), count)
    return [name for name in found if not name.startswith(COMMUNICATION)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_training_thread_waits_for_nothing(recipe: str) -> None:
    assert waiting_threads(recipe) == []


def test_a_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = GradientSynchronizer._ready

    def reads(self: Any, bucket: Any, name: str, parameter: Any) -> None:
        parameter.grad.sum().item()
        honest(self, bucket, name, parameter)

    monkeypatch.setattr(GradientSynchronizer, "_ready", reads)
    assert waiting_threads("Int8()")


def test_encoders_run_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, streams = Int8.encode, set[int]()

    def encode(self: Int8, x: Any, *more: Any) -> Any:
        if x.flat.is_cuda:
            streams.add(torch.cuda.current_stream(x.flat.device).cuda_stream)
        return honest(self, x, *more)

    monkeypatch.setattr(Int8, "encode", encode)
    run_both("Int8()", gpu(), lambda work: work())
    assert len(streams) == 1
    assert torch.cuda.default_stream(gpu()).cuda_stream not in streams


def attached(rank: int, group: SimulatedGroup, model: nn.Module, recipe: str) -> tuple[torch.optim.Optimizer, Session]:
    transport: Any = group.transports[rank] if rank else HostBoundary(group.transports[rank], gpu())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    world = WorldState(rank=rank, size=transport.world, local_rank=rank, device=next(model.parameters()).device)
    return optimizer, Session(model, optimizer, resolve(recipe), transport, world=world)


def test_a_recorded_graph_is_refused() -> None:
    group = SimulatedGroup(2)

    def work(rank: int) -> None:
        model = nn.Linear(8, 8).to(gpu() if rank == 0 else "cpu")
        _, session = attached(rank, group, model, "Dense()")
        if rank == 0:
            x, graph = torch.ones(2, 8, device=gpu()), torch.cuda.CUDAGraph()
            with pytest.raises(LoopError, match="CUDA graph"), torch.cuda.graph(graph):
                model(x).sum().backward()
        session._group.comm_thread.close()

    in_threads(work, 2)


def test_gradients_in_bfloat16_are_not_copied_to_float32_as_a_whole() -> None:
    """Beside gradients and their bucket, less than half of what a float32 copy of all would take."""
    group, width, layers = SimulatedGroup(2), 1024, 16
    numel = width * width * layers

    def work(rank: int) -> int:
        device = gpu() if rank == 0 else torch.device("cpu")
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(device, torch.bfloat16)
        optimizer, session = attached(rank, group, model, "Dense()")
        x, most = torch.ones(2, width, device=device, dtype=torch.bfloat16), 0
        for _ in range(3):
            if rank == 0:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            most = torch.cuda.max_memory_allocated() - before if rank == 0 else 0
        session.close()
        return most

    peak, _ = in_threads(work, 2)
    assert peak < 2 * numel + 4 * numel // 2
