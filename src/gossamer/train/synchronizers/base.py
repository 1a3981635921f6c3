"""Synchronizer: the interface that a session calls around every step, and what every kind of it is built from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.loop import LoopState, StepCosts
from gossamer.train.engine.report import Presence
from gossamer.train.engine.torch_hooks import LoopControls

NamedState = dict[str, dict[str, Tensor]]


def without_unsent(state: NamedState) -> NamedState:
    """What is remembered, but for what this worker alone has still to send."""
    return {
        name: {key: tensor for key, tensor in remembered.items() if not is_unsent(key)}
        for name, remembered in state.items()
    }


@dataclass(frozen=True)
class SyncContext:
    """What every synchronizer is built from, beside its strategy and its buckets."""

    transport: Transport
    comm_thread: CommThread
    loop: LoopState
    compressor: Compressor
    seed: int
    since: int = 0  # the step at which the recipe began: its compressors count from there

    def aggregation(self, step: int, moments: Moments = NO_MOMENTS) -> AggregationContext:
        """What a compressor is told of this rank at a step."""
        rank, world = self.transport.rank, self.transport.world
        return AggregationContext(step=step, seed=self.seed, rank=rank, world=world, **moments._asdict())

    def compare_parameters(self, ranks: Sequence[int], step: int) -> None:
        """Find out which tensors of which `ranks` differ, now that a step's reports have. On the training threads of
        all ranks, after the same step: another thread would see parameters that are being written."""
        check = self.loop.check
        texts = self.comm_thread.exchange(partial(self.transport.all_gather_text, check.text())).wait()
        check.compare({rank: texts[rank] for rank in ranks}, f"at step {step}")


class Synchronizer(ABC):
    """Synchronizes the ranks during one stage of a strategy."""

    judges_latest_pass = False  # whether what was not finite came from the latest backward pass
    in_step = True  # whether all ranks come to an epoch's end together
    roll_call: RollCall | None = None  # for calls outside of steps, where the recipe outlives the loss of a rank

    def __init__(self, controls: LoopControls | None = None) -> None:
        self.controls = controls or LoopControls()
        self.step = 0  # how many steps were made together
        self.asked_to_stop = False  # this rank wants the run to end
        self.stopping = False  # all ranks know that it ends
        self.asked_to_look = False  # this rank wants all to tell what they measured
        self.look_asked = False  # some rank did, in the last exchange
        self.all_trained = False  # every rank made the last exchange's step, so that all come to what follows it
        self.last_pass: int | None = None  # after so many backward passes another synchronizer takes over
        self.reference: float | None = None  # the weight that counts as one, once it is agreed upon

    @property
    @abstractmethod
    def buckets(self) -> Sequence[Bucket]:
        """What is compressed and sent together."""

    @property
    def passes(self) -> int:
        """How many backward passes count, by which stages begin; alike on all ranks that train in lock step."""
        return self.step

    @property
    def accumulating(self) -> bool:
        """Whether more backward passes are to come before there are gradients for the optimizer."""
        return False

    @property
    def between_steps(self) -> bool:
        """Whether no backward pass was made whose gradients an optimizer has still to use."""
        return not self.accumulating

    @property
    def touched(self) -> bool:
        """Whether averaged gradients were written to since the optimizer was shown them."""
        return False

    @property
    def agreed(self) -> Mapping[str, Tensor] | None:
        """Parameters by name as all workers agree on them; None where that is the model as it is."""
        return None

    def merge(self) -> Mapping[str, Tensor] | None:
        """`agreed`, gathered from all ranks where no rank has it: every rank calls it after the same step."""
        return self.agreed

    def end_calls(self) -> None:
        """This rank makes no more calls outside of steps, so that no other rank waits for them. Idempotent."""
        if self.roll_call is not None:
            self.roll_call.end()

    def end_run(self) -> None:  # noqa: B027 - most have nothing left to agree on
        """The session ends without a failure: take what all ranks agree on, if the others are there."""

    @abstractmethod
    def before_step(self, *, closure: bool) -> None:
        """The optimizer is about to make its step."""

    @abstractmethod
    def after_step(self) -> None:
        """It has made its step."""

    def use(self) -> None:  # noqa: B027 - most average no gradients
        """Some optimizer is about to use the gradients of parameters that are attached."""

    def step_skipped(self) -> None:
        """The scaler has left out the optimizer's step, for gradients that were not finite: it counts like any other,
        or ranks would count apart."""
        self.after_step()

    @abstractmethod
    def end_epoch(self) -> int:
        """Uneven inputs: take part in the other ranks' operations with weight 0 until all are out of data, or another
        stage begins. Returns how many of their steps this rank missed."""

    @abstractmethod
    def meet_to_save(self, call: Presence = Presence.SAVING) -> None:
        """Poll whether all ranks make the same call now. Raises LoopError where some do not.

        call: the call that needs all ranks after the same step.
        """

    def remembered(self) -> NamedState:
        """{parameter name: {key: tensor}}, as views."""
        return {}

    def progress(self) -> dict[str, Any]:
        """What a checkpoint needs beside `remembered` to go on exactly from here."""
        return {"step": self.step}

    def handed_over(self) -> dict[str, Any]:
        """What a newcomer among the workers goes on from. On the communication thread, between two exchanges, while the
        training thread waits."""
        return {"progress": self.progress(), "state": without_unsent(self.remembered())}

    def take_up(self, handed: Mapping[str, Any]) -> None:
        """Begin with what `handed_over` gave elsewhere; nothing is still to be sent."""
        theirs = handed["state"]
        kept = {
            name: {key: theirs.get(name, {}).get(key, tensor) for key, tensor in remembered.items()}
            for name, remembered in self.remembered().items()
        }
        self.resume(handed["progress"], kept)

    def rescale(self, factor: float) -> None:
        """What is still to be sent will be divided by `factor` times as many workers."""
        for bucket in self.buckets:
            bucket.rescale(factor)

    @abstractmethod
    def resume(self, progress: Mapping[str, Any], remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from a checkpoint of as many workers."""

    def begin_at(self, step: int) -> None:
        """Go on after so many steps that a single worker made."""
        self.step = step

    def restart(self) -> None:  # noqa: B027 - most have nothing but gradients
        """The parameters were overwritten by what all workers agree on."""

    def flush(self) -> None:  # noqa: B027 - most have nothing in flight between two steps
        """Wait for rounds in flight; apply them where they must not be lost: on all ranks after the same step."""

    def take_over_from(self, before: Synchronizer) -> None:
        """Go on where a synchronizer of the same stage ends, whose layout was another."""
        self.continue_from(before)
        self.step = before.step

    def continue_from(self, before: Synchronizer) -> None:
        """Go on where the synchronizer of the stage before ends."""
        self.controls.weight, self.controls.muted = before.controls.weight, before.controls.muted
        self.reference = before.reference
        self.asked_to_stop, self.stopping = before.asked_to_stop, before.stopping

    @abstractmethod
    def close(self) -> None:
        """Remove hooks from the model."""


# -- plain training in a world of one, bit for bit ---------------------------------------------------------------------


class SoloSynchronizer(Synchronizer):
    """Counts the optimizer's steps and reports each to `ended`; has no bucket, no state and no other rank."""

    in_step = False  # with no other rank that could have missed a step

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

    def remembered(self) -> NamedState:
        return {}

    def progress(self) -> dict[str, Any]:
        return {}

    def resume(self, progress: Mapping[str, Any], remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.begin_at(progress["step"])  # progress of several workers, folded

    def close(self) -> None:
        pass
