"""Session base: group, synchronizer and stages of a session, from its opening to its close.

`Session` adds a torch model, its optimizer and their hooks. `ArraySession` adds arrays that the loop passes in. Their
constructors call `_join`, `_build_layout`, `_begin` and `_opened` in this order.
"""

from __future__ import annotations

import atexit
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer import events
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import AveragingStage, GossipStage
from gossamer.base.former_names import former_attribute
from gossamer.base.kernels import buffer_pool
from gossamer.base.transport import Transport
from gossamer.comm.elastic.recognition import elastic, served
from gossamer.comm.runtime import interruption, open_sessions
from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.errors import MismatchError, Stopped
from gossamer.train.engine.bucket import kept_gradients
from gossamer.train.engine.extension import Extension, Extensions
from gossamer.train.engine.loop import LoopState
from gossamer.train.session import lifecycle_events
from gossamer.train.session.clipping_and_nonfinite import NonFiniteMonitor
from gossamer.train.session.group_calls import GroupCalls, leave
from gossamer.train.session.group_changes import GroupChanges, ServedChanges, ShardedWorld, WorldChange
from gossamer.train.session.scalars import sample_weight
from gossamer.train.session.session_status import SessionStatus
from gossamer.train.synchronizers.base import SoloSynchronizer, Synchronizer
from gossamer.train.synchronizers.stages import Fragments, StageSequence

SCRIPT_ENDS = (
    "a stop was requested, and the training loop continued outside of a block that it could leave. The script ends "
    "here on every rank with exit code 0; lines below the loop do not run. To continue there, write "
    "`if session.should_stop: break` at the loop's end, or `with gossamer.attach(...) as session:` around the loop."
)

NEVER_AVERAGED = (
    "the session has ended after {steps} steps, before the first average of {strategy}, so each worker has trained "
    "alone. Write a period that many rounds fit into: gossamer explain RECIPE --steps N shows what measured recipes "
    "retained by rounds"
)


class StopBlocks(Extension):
    """Counts the open blocks around the loop. After a stop, the next step leaves the innermost block or the script.

    Active in steps only after `end`.

    Args:
        end_session: closes the session at interpreter exit, as leaving its block would.
        gives_notice: whether this rank prints the notice.
    """

    order = 1

    def __init__(self, end_session: Callable[[], None], extensions: Extensions, *, gives_notice: bool) -> None:
        self._end_session, self._extensions, self._gives_notice = end_session, extensions, gives_notice
        self.blocks, self.over = 0, False

    def end(self) -> None:
        """Mark training as over."""
        self.over = True
        self._extensions.add(self)

    def pass_began(self) -> None:
        """Leave the innermost block by raising Stopped; after Ctrl-C, KeyboardInterrupt."""
        if not self.blocks:
            atexit.register(self._end_session)
            if self._gives_notice and not interruption.current.pending:
                events.notice(SCRIPT_ENDS)
        raise interruption.current.error()

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """Block that ends when this session's training is stopped; the lines below it then run."""
        self.blocks += 1
        try:
            yield
        except Stopped:
            if not self.over:
                raise  # another session's
        finally:
            self.blocks -= 1


class SessionBase(ABC):
    """Common part of sessions of models and of arrays."""

    model: nn.Module | None
    optimizer: Optimizer | None
    _parameters: Mapping[str, Parameter]  # those that are averaged, by name
    _world: ShardedWorld

    def __init__(self, recipe: Recipe, transport: Transport, seed: int) -> None:
        self.recipe, self._transport, self._seed = recipe, transport, seed
        self._extensions, self._nonfinite = Extensions(), NonFiniteMonitor()
        self._between_steps: list[Callable[[], None]] = []  # called after each step, on every rank
        self._weighs = False  # whether a batch weight was set
        self._muted_at = -1  # number of the pass at which the loop was last in no_sync()

    # -- beginning -------------------------------------------------------------------------------------------------

    def _join(self, transports: Sequence[Transport] = ()) -> CommThread:
        """Start the communication thread. transports: further transports to close together with the session's."""
        transport, devices = self._transport, [each.device for each in self._parameters.values()]
        fixed = None if served(transport) is None else False
        comm_thread = CommThread(devices, transport.make_progress, elastic(transport), fixed)
        self._group = GroupCalls(transport, comm_thread)
        self._leave = weakref.finalize(self, leave, comm_thread, (transport, *transports), self._group.pid)  # at exit
        self.status = SessionStatus(self.recipe, transport, lambda: self._synchronizer.step)
        self._stop = StopBlocks(self.close, self._extensions, gives_notice=transport.rank == 0)
        self._synchronizer: Synchronizer = SoloSynchronizer(self.status.step_ended)  # until ranks are compared
        return comm_thread

    @abstractmethod
    def _loop_state(self) -> LoopState:
        """The training loop as synchronizers see it."""

    def _build_layout(self, optimizer: Optimizer | None) -> Fragments:
        """Assign the parameters to buckets, for the first stage of the recipe."""
        comm_thread = self._group.comm_thread
        self._stages = StageSequence(
            self.recipe, optimizer, self._transport, comm_thread, self._loop_state(), self._seed
        )
        fragments = self._stages.fragments(self._parameters)
        self._layout = self._stages.layout_text(self._parameters)
        return fragments

    def _begin(self, fragments: Fragments) -> None:
        """Compare the ranks and begin the first stage; a newcomer to an elastic run joins the others instead."""
        group = self._group
        around = weakref.proxy(self), group.comm_thread, self._extensions
        if (member := served(self._transport)) is not None:
            self._changes: GroupChanges = ServedChanges(member, *around)
            self._changes.admit(self._newcomers_fingerprint())
        else:
            self._changes = GroupChanges(elastic(self._transport), *around)
        if not self._changes.joins and not group.alone and self._compare_ranks() and not group.comm_thread.is_fixed:
            raise MismatchError(
                "ranks of several frameworks train here, and a newcomer to an elastic run receives the state of one "
                "framework. Start one framework, or a fixed number of workers: gossamer run --workers 4."
            )
        self._synchronizer = self._stages.begin(self._parameters, fragments)
        self._changes.begin(self._newcomers_fingerprint())

    @abstractmethod
    def _compare_ranks(self) -> bool:
        """Raise MismatchError where ranks are not alike, else give all ranks rank 0's parameters. Returns whether they
        are of several frameworks."""

    def _opened(self) -> None:
        open_sessions.register(self)
        self._group.publish(lambda: self._synchronizer.roll_call)

    def __repr__(self) -> str:
        return self.status.text(self._parameters.values())

    def _repr_html_(self) -> str:
        return self.status.html(self._parameters.values())

    # -- in the loop -----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of committed exchanges; with local training, steps of this worker. With balance=True in LocalSGD or
        DiLoCo, its position in the common schedule, in which a step of a slow worker counts as several.

        Example:
            >>> session.steps
            0
        """
        return self._synchronizer.steps

    @property
    def accumulating(self) -> bool:
        """True if more backward passes follow before this step's gradients are complete. Step schedulers and the
        GradScaler only when it is False.

        Example:
            >>> optimizer.step()
            >>> if not session.accumulating:
            ...     scheduler.step()
        """
        return self._synchronizer.accumulating

    def _weigh(self, weight: float) -> None:
        """Set the weight of this rank's batches from now on."""
        self._synchronizer.controls.weight, self._weighs = sample_weight(weight), True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager that accumulates gradients locally; the next backward pass outside of it sends the sum.
        `ArraySession.give` returns None within it.

        Example:
            >>> with session.no_sync():
            ...     model(batch).square().mean().backward()
            >>> model(batch).square().mean().backward()
        """
        controls, self._muted_at = self._synchronizer.controls, self._synchronizer.passes
        before, controls.muted = controls.muted, True
        try:
            yield
        finally:
            self._synchronizer.controls.muted = before

    def request_stop(self) -> None:
        """Request the end of training on every rank after the same step; it takes effect in the next exchange. See
        `should_stop`.

        Example:
            >>> session.request_stop()
        """
        self._synchronizer.asked_to_stop = True

    @property
    def should_stop(self) -> bool:
        """True on every rank after the same step, once training is to end.

        If the loop continues anyway, its next step leaves the epoch() block; else the `with gossamer.attach(...)`
        block; else the script, with exit code 0.

        Example:
            >>> while not session.should_stop:
            ...     model(batch).square().mean().backward()
            ...     session.request_stop()
            ...     optimizer.step()
        """
        return self._stop.over

    ask_to_stop = former_attribute("session", "ask_to_stop", "request_stop")
    stopping = former_attribute("session", "stopping", "should_stop")

    # -- elastic runs ----------------------------------------------------------------------------------------------

    def on_change(self, callback: Callable[[WorldChange], None]) -> None:
        """Register a callback for elastic runs, called after a step in which workers joined or left.

        Args:
            callback: receives a WorldChange: new size and rank, lost ranks, number of new workers.

        Example:
            >>> session.on_change(lambda change: print(f"{change.size} workers, lost {change.lost}"))
        """
        self._changes.listen(callback)

    @abstractmethod
    def _newcomers_fingerprint(self) -> Mapping[str, str]:
        """The properties in which a newcomer must be equal to the workers that train already."""

    @abstractmethod
    def _shared_state(self) -> dict[str, Any]:
        """The state that all workers in lock step have equal, also within a step, for newcomers."""

    def _own_state(self) -> dict[str, Any]:
        """The state of this worker alone that a newcomer takes, too."""
        return {}

    @abstractmethod
    def _take_up(self, alike: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Continue from what `_shared_state` and `_own_state` returned on another worker."""

    def _first_step_made(self) -> None:  # noqa: B027 - most have nothing to compare
        """This newcomer has made its first step."""

    # -- between steps and stages ------------------------------------------------------------------------------------

    def _step_over(self) -> None:
        """Called after the optimizer step, after `after_step` of the synchronizer."""
        for act in self._extensions.after_step:
            act()
        synchronizer = self._synchronizer
        if synchronizer.stopping:
            self._stop.end()
        elif synchronizer.last_pass is not None and self._stages.over(synchronizer.passes):
            self._enter_next_stage()
        for act in self._between_steps:
            act()

    def _end_epoch(self) -> None:
        """Wait until every rank is out of data. Ranks that missed steps copy the state of a rank that made all.

        Gradients that were accumulated in `no_sync` and not sent yet remain, for the next epoch's first step, and those
        of parameters that the optimizer does not have, for the script."""
        with kept_gradients(self._parameters.values() if self._accumulates_locally else self._not_optimized()):
            missed = 0 if self.should_stop else self._synchronizer.end_epoch()
            while not self._synchronizer.stopping and self._stages.over(self._synchronizer.passes):
                self._enter_next_stage(missed)
                missed = self._synchronizer.end_epoch()
            if self._synchronizer.stopping:
                self._stop.end()
            if self._synchronizer.in_step:
                self._catch_up(missed)

    def _not_optimized(self) -> list[Parameter]:
        """The averaged parameters that the attached optimizer does not have."""
        return []

    @property
    def _accumulates_locally(self) -> bool:
        """Whether the loop was in `no_sync` since the last pass that was sent."""
        return self._muted_at == self._synchronizer.passes

    def _enter_next_stage(self, missed: int = 0) -> None:
        self._catch_up(missed)  # all ranks enter the stage with equal parameters
        self._enter_stage(self._synchronizer.passes)

    def _enter_stage(self, passes: int) -> None:
        self._synchronizer = self._stages.enter(passes, self._parameters, self._synchronizer)

    def _enter_restored_stage(self, passes: int, first_bytes: int) -> None:
        """Before a state is restored: enter its stage, with parameters divided into buckets as in that state."""
        self._synchronizer = self._stages.enter(passes, self._parameters, self._synchronizer, first_bytes)
        self._layout = self._stages.layout_text(self._parameters)

    @abstractmethod
    def _catch_up(self, missed: int) -> None:
        """Copy the state of a rank that made every step to the ranks that missed steps. missed: by this rank."""

    # -- ending ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Detach: remove all hooks and leave the group. Model and optimizer keep their state. Every rank calls it.

        Example:
            >>> session.close()
        """
        self._end("finished")

    def _end(self, how: events.Ended) -> None:
        if not self._group.forked and open_sessions.unregister(self):
            self._close(self._changes.ended(how))

    def _close(self, how: events.Ended) -> None:
        if how == "finished":
            self._end_run()
            if self._trained_alone and self._transport.rank == 0:
                events.notice(NEVER_AVERAGED.format(steps=self.status.steps, strategy=self.recipe.strategy))
        self._synchronizer.close()
        closed = lifecycle_events.ended(self._held(), self.steps, self._synchronizer, how)
        events.emit(self._compared(closed))
        self._leave()
        buffer_pool.blocks.release()

    def _end_run(self) -> None:
        """Called on all remaining ranks after the last step."""
        self._synchronizer.end_run()
        self._changes.farewell()

    @property
    def _trained_alone(self) -> bool:
        """Whether the steps since attach were too few for the first round of this recipe."""
        stage = self._stages.now
        if not isinstance(stage, AveragingStage | GossipStage) or stage.start or self._transport.world == 1:
            return False
        return 0 < self.status.steps < stage.schedule.sync_round(0).launch and not self.status.has_sent

    @abstractmethod
    def _held(self) -> Mapping[str, Tensor]:
        """Tensors on this rank that the ranks compare at the end."""

    def _compared(self, closed: events.Closed) -> events.Closed:
        """Add to `closed` whether all machines ended with equal tensors."""
        return lifecycle_events.compared(closed, self._transport)

    def __enter__(self) -> Self:
        self._stop.blocks += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        """Close the session. After a stop request, Stopped ends here, and the script continues below the block."""
        self._stop.blocks -= 1
        self._end(events.ended_by(kind))
        return kind is not None and issubclass(kind, Stopped) and self.should_stop
