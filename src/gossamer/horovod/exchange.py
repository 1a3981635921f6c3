"""Exchange: the gradients of one optimizer or tape, averaged over a process set by a session of arrays.

The front ends of the frameworks extend `RecipeExchange` by the way to their parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gossamer.engine import Session
from gossamer.errors import PeerLost
from gossamer.horovod.basics import Adasum, Average, ProcessSet, Sum, context, internal_error, join_lane
from gossamer.horovod.calls import ReductionOp
from gossamer.horovod.compression import Compressors
from gossamer.train.session.recipe_choice import Written, chosen_recipe
from gossamer.train.world_state import current as current_world

HALF = 'Dense(dtype="float16")'  # the recipe of Compression.fp16


class RecipeExchange(ABC):
    """The session of one optimizer's or tape's parameters.

    The session begins with the first exchange, when parameters have been broadcast; they are then rank 0's.

    Args:
        process_set: The ranks that exchange.
        recipe: A recipe of Gossamer; None: Dense().
        op: Average or Sum.
        server_optimizer: As for gossamer.engine.Session.
    """

    def __init__(
        self,
        process_set: ProcessSet,
        recipe: Written,
        op: ReductionOp,
        server_optimizer: Callable[[list[Tensor]], Optimizer] | None = None,
    ) -> None:
        self.process_set, self.recipe, self.op = process_set, recipe, op
        self.server_optimizer = server_optimizer
        self.session: Session | None = None
        self.unused = False  # gradients were exchanged, and no step was made with them

    @property
    def factor(self) -> int:
        """By which a mean is multiplied."""
        return len(self.process_set.ranks) if self.op is Sum else 1

    def open(self, parameters: Mapping[str, Tensor]) -> Session:
        """Begin the session with this rank's parameters."""
        transport = context().session_transport(self.process_set)
        recipe = self.recipe if transport is None else chosen_recipe(self.recipe, current_world())
        self.session = Session(parameters, recipe, transport, server_optimizer=self.server_optimizer)
        return self.session

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """A lost worker is raised as HorovodInternalError; join() and shutdown() find this exchange."""
        context().exchanges[self] = None
        try:
            yield
        except PeerLost as failure:
            raise internal_error(failure) from failure

    def restart(self) -> None:
        """End the session; the next exchange begins another. Every rank calls it."""
        session, self.session, self.unused = self.session, None, False
        if session is not None:
            session.close()

    @abstractmethod
    def holds(self, identities: set[int]) -> bool:
        """Whether one of the parameters is among these, by the front end's identity of a parameter."""

    @abstractmethod
    def end_epoch(self) -> None:
        """Join the other ranks' steps without data, until all are out of data; then take over their result."""


def restart_holders(identities: set[int]) -> None:
    """Begin the recipes of these parameters again: residuals and averages are about their values before."""
    for exchange in list(context().exchanges):
        if exchange.session is not None and exchange.holds(identities):
            exchange.restart()


def join(device: int = -1) -> int:
    """This rank is out of data: let the others continue, until all ranks have called it.

    Steps of other ranks' DistributedOptimizer are then means over the ranks that have data, and this rank takes over
    their parameters and optimizer state at the end. Calls of allreduce with Sum and Average receive zeros of this rank.

    Args:
        device: Not used.

    Returns:
        The rank that joined last.
    """
    wait = join_lane()
    if exchanges := [each for each in context().exchanges if each.session is not None]:
        with ThreadPoolExecutor(len(exchanges)) as pool:  # other ranks train them in turn
            ends = [pool.submit(copy_context().run, each.end_epoch) for each in exchanges]
        for end in ends:
            end.result()
    return wait()


def check_reduction(op: ReductionOp, gradient_predivide_factor: float, backward_passes_per_step: int) -> None:
    """Raise for arguments of DistributedOptimizer that do not describe a mean or sum of gradients."""
    if op is Adasum:
        raise NotImplementedError(
            "Adasum is not supported. Use op=hvd.Average, with the learning rate of one worker; recipes such as "
            "DiLoCo(period=50) also combine workers that train independently."
        )
    if op not in (Average, Sum):
        raise ValueError(f"gradients are combined by hvd.Average or hvd.Sum, not {op}")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor needs op=hvd.Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")


def recipe_of(recipe: Written, compression: Any, compressors: Compressors) -> Written:
    """The recipe that is written, or that of a compressor. compressors: the front end's Compression."""
    if compression not in (compressors.none, compressors.fp16):
        raise ValueError(
            f"{compression!r} compresses single tensors. Write a recipe instead, such as "
            'hvd.DistributedOptimizer(..., recipe="TopK(0.01)"); CONTRIBUTING.md shows a compressor of your own.'
        )
    if recipe is not None:
        return recipe
    return HALF if compression is compressors.fp16 else None
