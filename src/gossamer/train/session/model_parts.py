"""Model parts: what of a session's model lies on this rank, and what it decides with the ranks that hold the rest."""

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
from gossamer.train.checkpoint.state import Stateful
from gossamer.train.engine.parameter_views import swapped_in
from gossamer.train.engine.report import Agreement, unchanged
from gossamer.train.session.gradient_guards import TotalNorm
from gossamer.train.session.group_calls import GroupCalls
from gossamer.train.session.lifecycle_events import compared
from gossamer.train.sharding.local_shards import parameters_of
from gossamer.train.sharding.local_state import LocalModelState, LocalOptimizerState
from gossamer.train.sharding.model_group import ModelGroup

BETWEEN_MEANS = (
    "the session has ended between two means, so each rank's model is its own, and what rank 0 saves now is not the "
    "merged one. To keep that, write before session.close(), on every rank: `with session.averaged_parameters(model): "
    "torch.save(model.state_dict(), path)`"
)


class ModelParts:
    """A model that is whole on this rank; or, where `group` is given, of which other ranks may hold other parts."""

    def __init__(self, model: nn.Module, group: ModelGroup | None = None) -> None:
        self.views, self._group = parameters_of(model), group
        self._lent_at = -1  # the step at which the merged model was lent last
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
        """Whether other ranks hold other layers. Backward passes of a pipeline are over at different times, and there
        are several in a step: gradients then leave before the optimizer's step, where all ranks come together."""
        return self._group is not None and self._group.staged

    @property
    def shards(self) -> str:
        """Which ranks hold the same part, as checkpoints compare it; empty where each holds the whole."""
        return "" if self._group is None else self._group.shards

    @property
    def transports(self) -> Sequence[Transport]:
        """Those beside the session's own."""
        return () if self._group is None else self._group.transports

    def job(self, own: GroupCalls, comm_thread: CommThread) -> GroupCalls:
        """Calls of all ranks that write one checkpoint together."""
        return own if self._group is None else GroupCalls(self._group.job, comm_thread)

    def optimizer_state(self, optimizer: Optimizer) -> Stateful:
        return LocalOptimizerState(optimizer) if self.views.sharded else optimizer

    def saved(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Stateful]:
        """What a checkpoint holds of them, on this rank."""
        whole: Stateful = LocalModelState(model, self.views.gather) if self.views.sharded else model
        return {"model": whole, "optimizer": self.optimizer_state(optimizer)}

    @contextmanager
    def swapped_in(self, values: Mapping[str, Tensor], model: nn.Module, step: int) -> Iterator[None]:
        """Within the block, `model`, of the same parts, has those of `values` that are there, buffers among them."""
        self._lent_at = step
        self.views.gather()
        views = parameters_of(model)
        try:
            with swapped_in(values, views.parameters, model):
                yield
                views.gather()  # a pass within the block has made copies
        finally:
            views.close()

    def whole(self, closed: events.Closed, transport: Transport) -> events.Closed:
        """With a digest of all parts of the replica, which replicas compare, where the others end as well.

        Rank 0 tells the user if each rank keeps a model of its own, unless the merged one was lent after the last step.
        """
        if (
            transport.rank == 0
            and closed.ended == "finished"
            and not closed.holds_merged
            and self._lent_at != closed.steps
        ):
            events.notice(BETWEEN_MEANS)
        if self._group is None or closed.ended != "finished":
            return compared(closed, transport)
        return self._group.whole(closed)

    def refuse(self, what: str) -> None:
        """Raise AttachError for what needs the whole model on every rank."""
        if self._group is not None:
            raise AttachError(
                f"{what} is not there for a session with mesh=: it would act on this rank's part of the model alone. "
                "Call session.close(), change what is to be changed, and call gossamer.attach(..., mesh=...) again."
            )

    def refuse_other_shards(self, found: LoadedCheckpoint) -> None:
        """Raise CheckpointError for a checkpoint of parts that are not those of this run."""
        written: Any = found.sessions[0].get("shards", "")
        if written != self.shards or (written and found.news is not None):
            raise CheckpointError(
                f"this checkpoint holds a model in parts of the ranks {written or 'none'} and this run has "
                f"{self.shards or 'none'}, each of which replicas share: what a recipe remembers of a part cannot be "
                "cut anew. Run with the meshes it was written with; or write model and optimizer by "
                "torch.distributed.checkpoint beside it, which cuts them anew, and begin the recipe without memory."
            )

    def remove(self) -> None:
        """Remove hooks from the model."""
        self.views.close()
