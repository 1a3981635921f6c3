"""Virtual workers: one thread each, real sessions, a transport that meets in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from laws.laws import in_threads
from torch import nn
from torch.nn.functional import mse_loss

from gossamer import engine, events
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.transport import Transport
from gossamer.comm.runtime.open_sessions import unregister
from gossamer.comm.simulated import SimulatedGroup
from gossamer.train.session.session import Session

Rule = Callable[[nn.Module], torch.optim.Optimizer]
Batch = tuple[torch.Tensor, torch.Tensor]
Started = tuple[nn.Module, torch.optim.Optimizer, Session]


class Nothing:
    """A world without shards."""

    lap = 0

    def watch(self, progress: Callable[[], object]) -> None:
        """No draws are to be told from training."""

    def begin_training(self) -> None:
        """There are no shards of an earlier session."""

    def enter_epoch(self) -> None:
        """There is nothing to be drawn."""

    def entered_epochs(self) -> list[int]:
        return []

    def leave_epoch(self, entered: Sequence[Sequence[int]]) -> None:
        assert not any(entered)

    def move(self, rank: int, size: int, positions: Any, *, stayed: Any = ()) -> None:
        """There are none to be dealt out again."""

    def parts_in_use(self, rank: int, size: int) -> list[Any]:
        return []

    def divide(self, shares: Sequence[int], parts: Sequence[Sequence[Any]], rank: int) -> None:
        assert not any(parts)

    def data(self) -> list[str]:
        return []

    def note_trained(self) -> None:
        """There is nothing to be drawn."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


@dataclass
class Worker:
    """What one virtual worker has at hand."""

    rank: int
    world: int
    transport: Transport
    sessions: list[Session] = field(default_factory=list)
    array_sessions: list[engine.Session] = field(default_factory=list)

    def arrays(self, arrays: Mapping[str, Any], recipe: Any, **options: Any) -> engine.Session:
        """A session of arrays, closed once the work is done."""
        self.array_sessions.append(engine.Session(arrays, recipe, self.transport, **options))
        return self.array_sessions[-1]

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Any = None, **options: Any) -> Session:
        options = {"world": Nothing(), **options}
        session = Session(model, optimizer, resolve(recipe), self.transport, **options)
        self.sessions.append(session)
        return session

    def start(self, model: nn.Module, rule: Rule, recipe: Any = None, **options: Any) -> Started:
        """The model, its optimizer and their session."""
        optimizer = rule(model)
        return model, optimizer, self.attach(model, optimizer, recipe, **options)


def cluster(
    work: Callable[[Worker], Any], world: int, wrap: Callable[[Transport], Transport] = lambda transport: transport
) -> list[Any]:
    """Run work(worker) in a thread per rank; returns results by rank, or raises the first real failure."""
    group = SimulatedGroup(world)

    def run(rank: int) -> Any:
        worker = Worker(rank, world, wrap(group.transports[rank]))
        try:
            result = work(worker)
            for arrays in worker.array_sessions:
                arrays.close()
        except BaseException:
            group.leave()
            raise
        finally:
            for arrays in worker.array_sessions:  # after a failure, too, or other workers would wait for this one
                arrays._synchronizer.close()
            for session in worker.sessions:
                for hook in session._hooks:
                    hook.remove()
                session._synchronizer.close()
                session._group.comm_thread.close()
                unregister(session)  # or the interpreter would end its run, with others who are gone
        return result

    return in_threads(run, world)


_global_generator = threading.Lock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's global generator is shared by the threads: one builds its model at a time."""
    with _global_generator:
        torch.manual_seed(seed)
        yield


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A small model whose every rank starts from other weights: attach must make them equal."""
    with seeded(seed):
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def batch(step: int, rank: int, size: int = 4, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (
        torch.randn(size, 6, generator=generator, dtype=torch.float64).to(dtype),
        torch.randn(size, 3, generator=generator, dtype=torch.float64).to(dtype),
    )


def joined(batches: Iterable[Batch]) -> Batch:
    """Several batches as one."""
    inputs, targets = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    inputs, targets = batch(step, rank, dtype=next(model.parameters()).dtype)
    return mse_loss(model(inputs), targets)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    optimizer.step()


def trained_alone(rule: Rule, steps: int, batches: Callable[[int], Iterable[Batch]]) -> torch.Tensor:
    """Parameters of one process on the joined batches of each step, from where rank 0 begins."""
    model = network(0)
    optimizer = rule(model)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = joined(batches(step))
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return parameters(model)


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Callable[[], float]:
    """What optimizers that look at the loss themselves are given."""

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, 0, rank)
        loss.backward()
        return float(loss.detach())

    return closure


def grow(layer: nn.Linear) -> None:
    """One more output, like the first."""
    layer.weight = nn.Parameter(torch.cat([layer.weight.detach(), layer.weight.detach()[:1]]))
    layer.bias = nn.Parameter(torch.cat([layer.bias.detach(), layer.bias.detach()[:1]]))


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def agree(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """What all workers have, bit for bit."""
    for tensor in tensors[1:]:
        assert torch.equal(tensor, tensors[0]), "the workers hold different bits"
    return tensors[0]


@contextmanager
def subscribed(listener: Callable[[events.Event], None]) -> Iterator[None]:
    stop = events.subscribe(listener)
    try:
        yield
    finally:
        stop()


@contextmanager
def heard(kind: type[events.Event] = events.Event) -> Iterator[list[Any]]:
    """Events of a kind that are emitted within the block, by any worker."""
    found: list[Any] = []
    with subscribed(lambda event: found.append(event) if isinstance(event, kind) else None):
        yield found


@contextmanager
def notices() -> Iterator[list[str]]:
    """What is said to the user within the block."""
    said: list[str] = []
    with subscribed(lambda event: said.append(event.message) if isinstance(event, events.Noticed) else None):
        yield said
