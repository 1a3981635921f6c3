"""Model parts: the part of a session's model on this rank, and common decisions with the ranks that hold the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer import events
from gossamer.base.transport import Transport
from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.errors import AttachError, CheckpointError
from gossamer.train.checkpoint.coordinated import LoadedCheckpoint
from gossamer.train.checkpoint.state import OptimizerState, Stateful
from gossamer.train.engine.parameter_views import swapped_in
from gossamer.train.engine.step_decision import Agreement, unchanged
from gossamer.train.session.clipping_and_nonfinite import TotalNorm
from gossamer.train.session.group_calls import GroupCalls
from gossamer.train.session.lifecycle_events import compared
from gossamer.train.sharding.local_shards import LocalModelState, LocalOptimizerState, parameters_of
from gossamer.train.sharding.model_group import ModelGroup

BETWEEN_MEANS = (
    "the session has ended between two averages, so each rank has its own parameters, and a model saved by rank 0 is "
    "not the averaged one. To keep that, write before session.close(), on every rank: `with "
    "session.averaged_parameters(model): torch.save(model.state_dict(), path)`"
)


class ModelParts:
    """A model that is whole on this rank; or, with `group`, divided among ranks."""

    def __init__(self, model: nn.Module, group: ModelGroup | None = None) -> None:
        self.views, self._group = parameters_of(model), group
        self._lent_at = -1  # the step at which averaged parameters were swapped in last
        if group is not None:
            group.hold(self.views)

    @property
    def agree(self) -> Agreement:
        return unchanged if self._group is None else self._group.agree

    @property
    def agree_in_round(self) -> Agreement:
        return unchanged if self._group is None else self._group.agree_in_round

    @property
    def total_norm(self) -> TotalNorm | None:
        return None if self._group is None else self._group.total_norm

    @property
    def staged(self) -> bool:
        """Whether other ranks hold other layers. Backward passes of a pipeline end at different times, and a step has
        several; gradients are then sent before the optimizer step, where all ranks meet."""
        return self._group is not None and self._group.staged

    @property
    def shards(self) -> str:
        """The ranks that hold the same part, for comparison with checkpoints; empty if each rank holds the whole."""
        return "" if self._group is None else self._group.shards

    @property
    def transports(self) -> Sequence[Transport]:
        """Transports in addition to the session's own."""
        return () if self._group is None else self._group.transports

    def job(self, own: GroupCalls, comm_thread: CommThread) -> GroupCalls:
        """Calls of all ranks that write a checkpoint together."""
        return own if self._group is None else GroupCalls(self._group.job, comm_thread)

    def optimizer_state(self, optimizer: Optimizer) -> Stateful:
        return LocalOptimizerState(optimizer) if self.views.sharded else OptimizerState(optimizer)

    def saved(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Stateful]:
        """Model and optimizer as saved by this rank."""
        whole: Stateful = LocalModelState(model, self.views.gather) if self.views.sharded else model
        return {"model": whole, "optimizer": self.optimizer_state(optimizer)}

    @contextmanager
    def swapped_in(self, values: Mapping[str, Tensor], model: nn.Module, step: int) -> Iterator[None]:
        """Context manager that writes `values` into `model`, of the same parts, including its buffers."""
        self._lent_at = step
        self.views.gather()
        views = parameters_of(model)
        try:
            with swapped_in(values, views.parameters, model):
                yield
                views.gather()  # a pass within the block may have gathered parameters
        finally:
            views.close()

    def whole(self, closed: events.Closed, transport: Transport, *, alone: bool) -> events.Closed:
        """Add a digest of all parts of the replica, which replicas compare at the end.

        Rank 0 prints a notice if each rank keeps its own model, unless the averaged one was swapped in after the last
        step, or none was ever made (`alone`).
        """
        if (
            transport.rank == 0
            and not alone
            and closed.ended == "finished"
            and not closed.holds_merged
            and self._lent_at != closed.steps
        ):
            events.notice(BETWEEN_MEANS)
        if self._group is None or closed.ended != "finished":
            return compared(closed, transport)
        return self._group.whole(closed)

    def refuse(self, what: str) -> None:
        """Raise AttachError for calls that need the whole model on every rank."""
        if self._group is not None:
            raise AttachError(
                f"{what} is not supported with mesh=: it would change this rank's part of the model only. "
                "Call session.close(), make the change, and call gossamer.attach(..., mesh=...) again."
            )

    def refuse_other_shards(self, found: LoadedCheckpoint) -> None:
        """Raise CheckpointError for a checkpoint with other parts than this run."""
        written: Any = found.sessions[0].get("shards", "")
        if written != self.shards or (written and found.news is not None):
            raise CheckpointError(
                f"this checkpoint has a model in parts of the ranks {written or 'none'}, but this run has "
                f"{self.shards or 'none'}: the recipe's state of a part cannot be divided again. Use the meshes with "
                "which it was written; or also save model and optimizer by torch.distributed.checkpoint, which can "
                "reshard them, and begin the recipe without its state."
            )

    def remove(self) -> None:
        """Remove hooks from the model."""
        self.views.close()
