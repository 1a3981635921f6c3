"""Synchronizer: the interface that a session calls around every optimizer step, and its common parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.compressors.sharded import is_unsent
from gossamer.base.aggregation import NO_MOMENTS, AggregationContext, Moments
from gossamer.base.transport import Transport
from gossamer.comm.environment.roll_call import RollCall
from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.errors import LoopError
from gossamer.train.engine.autograd_hooks import LoopControls
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.loop import LoopState, StepCosts
from gossamer.train.engine.step_decision import Presence

NamedState = dict[str, dict[str, Tensor]]


def without_unsent(state: NamedState) -> NamedState:
    """Remove the state that this worker alone has still to send (residuals)."""
    return {
        name: {key: tensor for key, tensor in remembered.items() if not is_unsent(key)}
        for name, remembered in state.items()
    }


@dataclass(frozen=True)
class SyncContext:
    """Dependencies of every synchronizer, in addition to its strategy and its buckets."""

    transport: Transport
    comm_thread: CommThread
    loop: LoopState
    compressor: Compressor
    seed: int
    since: int = 0  # the step at which the recipe began: its compressors count from there

    def aggregation(self, step: int, moments: Moments = NO_MOMENTS) -> AggregationContext:
        """Arguments of this rank's compressor at a step."""
        rank, world = self.transport.rank, self.transport.world
        return AggregationContext(step=step, seed=self.seed, rank=rank, world=world, **moments._asdict())

    def compare_parameters(self, ranks: Sequence[int], step: int) -> None:
        """Find the tensors in which `ranks` differ, after the reports of a step differed.

        Called on the training thread of all ranks after the same step: other threads would read parameters that are
        being written.
        """
        check = self.loop.check
        texts = self.comm_thread.exchange(partial(self.transport.all_gather_text, check.text())).wait()
        check.compare({rank: texts[rank] for rank in ranks}, f"at step {step}")


class Synchronizer(ABC):
    """Synchronizes the ranks during one stage of a strategy."""

    judges_latest_pass = False  # whether non-finite values come from the latest backward pass
    in_step = True  # whether all ranks reach the end of an epoch together
    in_common = True  # whether all ranks hold common parameters, at least between two rounds
    roll_call: RollCall | None = None  # for calls outside of steps, if the recipe tolerates the loss of a rank

    def __init__(self, controls: LoopControls | None = None) -> None:
        self.controls = controls or LoopControls()
        self.step = 0  # number of common steps
        self.asked_to_stop = False  # this rank requests the end of the run
        self.stopping = False  # all ranks have received such a request
        self.asked_to_look = False  # this rank requests the measurements of all ranks
        self.look_asked = False  # a rank requested them in the last exchange
        self.all_trained = False  # every rank trained in the last exchange, so all execute the code after it
        self.last_pass: int | None = None  # number of backward passes after which another synchronizer takes over
        self.reference: float | None = None  # weight that counts as 1, agreed on by all ranks

    @property
    @abstractmethod
    def buckets(self) -> Sequence[Bucket]:
        """Groups of parameters that are compressed and sent together."""

    @property
    def steps(self) -> int:
        """`step` without averages that no optimizer has used so far."""
        return self.step

    @property
    def landed(self) -> int:
        """Number of exchanges that changed the state that all workers have in common."""
        return self.step

    @property
    def passes(self) -> int:
        """Number of backward passes that count for the start of stages; equal on all ranks in lock step."""
        return self.step

    @property
    def accumulating(self) -> bool:
        """Whether more backward passes follow before the optimizer has its gradients."""
        return False

    @property
    def batch_size(self) -> int:
        """Number of samples of this worker's next backward pass. Raises LoopError for a recipe without global batch."""
        raise LoopError(
            "session.batch_size is this worker's part of a global batch, and the recipe has none. Write "
            "gossamer.attach(model, optimizer, global_batch=256, balance=True)."
        )

    @property
    def between_steps(self) -> bool:
        """Whether no gradients are waiting for an optimizer step."""
        return not self.accumulating

    @property
    def touched(self) -> bool:
        """Whether averaged gradients were modified after the exchange."""
        return False

    @property
    def agreed(self) -> Mapping[str, Tensor] | None:
        """Parameters by name that all workers agree on; None if these are the model's parameters."""
        return None

    def merge(self) -> Mapping[str, Tensor] | None:
        """Return `agreed`, computed from all ranks if no rank has it. Every rank calls it after the same step."""
        return self.agreed

    def swapping(self) -> AbstractContextManager[None]:
        """Context manager around a block in which the model holds the result of `merge` instead of its own values."""
        return nullcontext()

    def end_calls(self) -> None:
        """Announce that this rank makes no more calls outside of steps. Idempotent."""
        if self.roll_call is not None:
            self.roll_call.end()

    def end_run(self) -> None:  # noqa: B027 - most have nothing left to agree on
        """End the session without a failure: adopt the parameters that all ranks agree on, if the others respond."""

    def leave(self) -> None:  # noqa: B027 - others in lock step repeat the exchange without this rank
        """Called on a worker that leaves while the others continue."""

    @abstractmethod
    def before_step(self, *, closure: bool) -> None:
        """Called before optimizer.step()."""

    @abstractmethod
    def after_step(self) -> None:
        """Called after optimizer.step()."""

    def use(self) -> None:  # noqa: B027 - most average no gradients
        """Called before any optimizer uses gradients of attached parameters."""

    def step_skipped(self) -> None:
        """Called when the scaler skipped the optimizer step because of non-finite gradients. The step counts as usual,
        so that the counts of all ranks stay equal."""
        self.after_step()

    @abstractmethod
    def end_epoch(self) -> int:
        """For uneven inputs: join the operations of the other ranks with weight 0 until all are out of data or another
        stage begins. Returns the number of steps that this rank missed."""

    @abstractmethod
    def meet_to_save(self, call: Presence = Presence.SAVING) -> None:
        """Poll whether all ranks make the same call now. Raises LoopError otherwise.

        Args:
            call: the call that all ranks must make after the same step.
        """

    def remembered(self) -> NamedState:
        """{parameter name: {key: tensor}}, as views."""
        return {}

    def progress(self) -> dict[str, Any]:
        """State of a checkpoint for an exact resume, in addition to `remembered`."""
        return {"step": self.step}

    def handed_over(self) -> dict[str, Any]:
        """State for a worker that joins. Called on the communication thread between two exchanges, while the training
        thread waits."""
        return {"progress": self.progress(), "state": without_unsent(self.remembered())}

    def take_up(self, handed: Mapping[str, Any]) -> None:
        """Start from the result of `handed_over` on another worker, without unsent residuals."""
        remote = handed["state"]
        kept = {
            name: {key: remote.get(name, {}).get(key, tensor) for key, tensor in remembered.items()}
            for name, remembered in self.remembered().items()
        }
        self.resume(handed["progress"], kept)

    def joined(self) -> None:  # noqa: B027 - most have taken up all of it
        """Called on a worker that has joined, on its training thread, before its loop begins."""

    def take_place(self, rank: int, world: int) -> None:
        """Keep all unsent residuals after this worker's rank or the number of workers changed."""
        for bucket in self.buckets:
            bucket.take_place(AggregationContext(rank=rank, world=world))

    def rescale(self, factor: float) -> None:
        """Scale unsent residuals, after the number of workers that they are divided by changed by `factor`."""
        for bucket in self.buckets:
            bucket.rescale(factor)

    @abstractmethod
    def resume(self, progress: Mapping[str, Any], remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from a checkpoint of the same number of workers."""

    def begin_at(self, step: int) -> None:
        """Continue after `step` steps that a single worker made."""
        self.step = step

    def restart(self) -> None:  # noqa: B027 - most have nothing but gradients
        """Called after the parameters were overwritten with values that all workers agree on."""

    def flush(self) -> None:  # noqa: B027 - most have nothing in flight between two steps
        """Wait for rounds in flight, and apply them where they must not be lost. On all ranks after the same step."""

    def take_over_from(self, before: Synchronizer) -> None:
        """Continue from a synchronizer of the same stage with another layout."""
        self.continue_from(before)
        self.step = before.step

    def continue_from(self, before: Synchronizer) -> None:
        """Continue from the synchronizer of the previous stage."""
        self.controls.weight, self.controls.muted = before.controls.weight, before.controls.muted
        self.reference = before.reference
        self.asked_to_stop, self.stopping = before.asked_to_stop, before.stopping

    @abstractmethod
    def close(self) -> None:
        """Remove hooks from the model."""


# -- plain training with one worker, bit for bit -----------------------------------------------------------------------


class SoloSynchronizer(Synchronizer):
    """Counts optimizer steps and reports each to `ended`. It has no buckets, no state and no other ranks."""

    in_step = False  # no other rank could have missed a step

    def __init__(self, ended: Callable[[bool, StepCosts], None]) -> None:
        super().__init__()
        self._ended = ended

    @property
    def buckets(self) -> Sequence[Bucket]:
        return ()

    def before_step(self, *, closure: bool) -> None:
        pass

    def after_step(self) -> None:
        self.step += 1
        self._ended(False, {})
        self.stopping = self.asked_to_stop

    def end_epoch(self) -> int:
        return 0

    def meet_to_save(self, call: Presence = Presence.SAVING) -> None:
        pass

    def progress(self) -> dict[str, Any]:
        return {}

    def resume(self, progress: Mapping[str, Any], remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.begin_at(progress["step"])  # combined progress of several workers

    def close(self) -> None:
        pass
