"""The one stateful object: what the workers remember between steps, and the training loop's few words to it."""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import isfinite
from typing import Any, Self, TypeVar

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gossamer import events
from gossamer.checkpoint import coordinated, reshard
from gossamer.checkpoint.state import Stateful
from gossamer.compressors.sharded import is_owed, settle
from gossamer.core.aggregation import AggregationContext
from gossamer.errors import AttachError, LayoutError, LoopError, Stopped, require
from gossamer.recipes.recipe import Recipe
from gossamer.reducer.bucket import copy_state, layout_text
from gossamer.reducer.model_buffers import ModelBuffers
from gossamer.reducer.optimizer_settings import settings
from gossamer.reducer.parameter_views import copy_parameters, swapped_in, trainable
from gossamer.reducer.reduction import ScaleState, StepContext
from gossamer.runtime.comm_thread import CommThread
from gossamer.runtime.open_sessions import register, unregister
from gossamer.runtime.transport import Transport
from gossamer.session import lifecycle_events, uneven_inputs
from gossamer.session.foreign_optimizers import ForeignOptimizerGuard, OptimizerStepHook, refuse_strangers
from gossamer.session.gradient_guards import NonFiniteMonitor, Scaler, check_norm, clip_gradients
from gossamer.session.lifecycle_events import numbers
from gossamer.session.momentum_transfer import take_over
from gossamer.session.session_checkpoint import refuse_misfit
from gossamer.session.startup_checks import NO_BATCH, FirstBatch, compare, fingerprint, hand_out
from gossamer.synchronizers.base import LoopState, NonFiniteOrigin, StepCosts, Synchronizer
from gossamer.synchronizers.stages import StageSequence
from gossamer.version import __version__

T = TypeVar("T")


class Session:
    """Trains `model` with `optimizer` together with the other workers of `transport`, as `recipe` says.

    Made by gossamer.attach. Raises MismatchError where ranks are not alike.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        recipe: Recipe,
        transport: Transport,
        *,
        world: Stateful,
        scaler: Scaler | None = None,
        clip_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        check_norm(clip_norm)
        self.model, self.optimizer, self.recipe = model, optimizer, recipe
        self.scaler, self.clip_norm = scaler, clip_norm
        self._transport, self._world, self._seed, self._pid = transport, world, seed, os.getpid()
        self._adopt(trainable(model))
        self._comm_thread = CommThread(next(iter(self._parameters.values())).device, transport.make_progress)
        self._leave = weakref.finalize(self, leave, self._comm_thread, transport, self._pid)  # at exit, too
        self._buffers, self._first_batch, self._patience, self._solo_steps = (
            ModelBuffers(model),
            FirstBatch(),
            NonFiniteMonitor(),
            0,
        )
        self._last, self._scale, self._stop, self._muted_at = time.perf_counter(), self._current_scale(), False, -1
        self._synchronizer: Synchronizer | None = None
        loop = LoopState(
            step_context=self._step_context,
            scale=self._current_scale,
            poll_scaler=self._poll_scaler,
            settings=self._settings,
            buffers=self._buffers,
            averaged=self._buffers.averaged,
            batch=lambda: self._first_batch.hash,
            warn=FirstBatch.compare if transport.rank == 0 else lambda batches: None,
            ended=self._step_ended,
            judged=partial(self._judge, "exchange"),
            guarded=partial(self._judge, "pass"),
            clips=clip_norm is not None,
        )
        self._stages = StageSequence(recipe, optimizer, transport, self._comm_thread, loop, seed)
        fragments = self._stages.fragments(self._parameters)
        self._layout = layout_text(bucket for buckets in fragments for bucket in buckets)
        events.emit(lifecycle_events.begun(model, optimizer, recipe, fragments, transport))
        try:
            self._shake_hands()
            self._synchronizer = self._stages.begin(self._parameters, fragments)
        except BaseException:
            self._comm_thread.close()
            raise
        self._hooks: list[RemovableHandle | OptimizerStepHook] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            first := model.register_forward_pre_hook(self._first_batch.see, with_kwargs=True),
            OptimizerStepHook(self._see),
        ]
        self._first_batch.hook = first
        register(self)

    # -- beginning -------------------------------------------------------------------------------------------------

    def _at(self) -> AggregationContext:
        return AggregationContext(seed=self._seed, rank=self._transport.rank, world=self._transport.world)

    def _settings(self) -> str:
        """What must be alike where ranks make the same step. Apart, one may be a step behind its scheduler."""
        return "" if self._stages.now.apart else f"{settings(self.optimizer)}; loss scale={self._current_scale()}"

    def _shake_hands(self) -> None:
        if self._transport.world == 1:
            return
        options = f"clip_norm={self.clip_norm}, scaler={self._current_scale() is not None}, seed={self._seed}"
        shown = fingerprint(recipe=repr(self.recipe), layout=self._layout, optimizer=self.optimizer, options=options)
        compare(self._tell(json.dumps(shown)))
        hand_out([*self.model.parameters(), *self.model.buffers()], self._tell, self._broadcast)
        self._buffers.see_constants()

    def _on_lane(self, job: Callable[[], T]) -> T:
        if os.getpid() != self._pid:
            raise LoopError("a forked process has no part in the group. Save, load and train where attach was called.")
        return self._comm_thread.submit(job).wait()

    # -- in the loop -----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """How many steps were made: exchanges that were committed, or backward passes while workers train apart."""
        return self._solo_steps if self._synchronizer is None else self._synchronizer.step

    def weight(self, weight: float) -> None:
        """Say how much this rank's batch counts, usually len(batch), before backward; stays until said again.

        The mean gradient is then sum(w g) / sum(w). Every rank should say it, or none.
        """
        require(isfinite(weight) and weight >= 0, f"a weight is a finite number of samples, not {weight}")
        if self._synchronizer is not None:
            self._synchronizer.weight = float(weight)

    def log(self, **metrics: float | Tensor) -> None:
        """Write numbers, such as loss=loss, into the run's record; tensors of one entry as well."""
        events.emit(events.Logged(step=self.steps, values=numbers(metrics)))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this rank; the next backward outside sends the sum."""
        if self._synchronizer is None:
            yield
            return
        before, self._synchronizer.muted, self._muted_at = self._synchronizer.muted, True, self._synchronizer.passes
        try:
            yield
        finally:
            self._synchronizer.muted = before

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """Let ranks run out of data at different times within the block, on every rank once per epoch.

        A rank that is done keeps the others company with weight 0 until all are; then it takes over the parameters,
        buffers and optimizer state from one that made every step.
        """
        yield
        if self._synchronizer is None:
            return
        missed = self._synchronizer.end_epoch()
        while not self._synchronizer.stopping and self._stages.over(self._synchronizer.passes):
            self._synchronizer = self._go_on(self._synchronizer, missed)
            missed = self._synchronizer.end_epoch()
        if self._synchronizer.stopping:
            raise Stopped
        if self._synchronizer.in_step:
            self._catch_up(missed)

    def _go_on(self, synchronizer: Synchronizer, missed: int) -> Synchronizer:
        """Enter the stage that begins, on every rank with the same parameters."""
        self._catch_up(missed)
        return self._stages.enter(synchronizer.passes, self._parameters, synchronizer)

    def _catch_up(self, missed: int) -> None:
        parts = [self.optimizer, *([self.scaler] if self.scaler is not None else [])]
        uneven_inputs.catch_up(self.model, parts, missed, self._transport.rank, self._tell, self._broadcast)

    @contextmanager
    def merged(self, model: nn.Module) -> Iterator[nn.Module]:
        """Evaluate what the workers agree on: within the block, `model` has the parameters that are merged.

        With lock-step recipes that is the model as it is; with Gossip in lock step the mean over workers, for which
        every rank must come here; else the servers', or the mean over workers, as they are while others train on.
        `model`: the one that is attached, or another with the same parameters, by name.
        """
        agreed = self._synchronizer.merge() if self._synchronizer is not None else None
        with swapped_in(agreed or {}, trainable(model)):
            yield model

    # -- around the optimizer --------------------------------------------------------------------------------------

    def _see(self, optimizer: Optimizer) -> None:
        if self._synchronizer is not None and optimizer is not self.optimizer and os.getpid() == self._pid:
            self._beside.check(optimizer, local=self._muted_at == self._synchronizer.passes)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if os.getpid() != self._pid:
            return
        refuse_strangers(optimizer, self._averaged_ids)
        closure = args[1:] or [value for value in kwargs.values() if value is not None]
        if self._synchronizer is not None:
            self._synchronizer.before_step(closure=bool(closure))
        touched = self.scaler is None and self._synchronizer is not None and self._synchronizer.touched
        self._momentum.before(self.steps, closure=bool(closure), touched=touched)
        if self.clip_norm is not None:
            clip_gradients(self._parameters.values(), self.clip_norm, optimizer, closure=bool(closure))

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if os.getpid() != self._pid:
            return
        self._momentum.after()
        if self._synchronizer is not None:
            self._synchronizer.after_step()
            self._stop = self._synchronizer.stopping
            if not self._stop and self._stages.over(self._synchronizer.passes):
                self._synchronizer = self._go_on(self._synchronizer, 0)
        else:
            self._solo_steps += 1
            self._step_ended()
        if self._stop:
            raise Stopped

    def _current_scale(self) -> float | None:
        if self.scaler is None or not self.scaler.is_enabled():
            return None
        return self.scaler.get_scale()

    def _poll_scaler(self) -> ScaleState:
        before, self._scale = self._scale, self._current_scale()
        return ScaleState(self._scale, skipped_step=self._scale != before)

    def _step_context(self) -> StepContext:
        return StepContext(self._poll_scaler(), self._settings(), self._momentum.now(), self._first_batch.hash)

    def _judge(self, what: str, blame: NonFiniteOrigin | None) -> None:
        self._patience.judge(what, blame, self.steps, scaled=self.scaler is not None)

    def _step_ended(self, skipped: bool = False, costs: StepCosts | None = None) -> None:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        events.emit(events.StepEnded(step=self.steps, seconds=seconds, skipped=skipped, **(costs or {})))

    # -- saving and ending -----------------------------------------------------------------------------------------

    def ask_to_stop(self) -> None:
        """End training cleanly: every rank raises Stopped after the same step, once the next exchange has landed, which
        leaves the block `with gossamer.attach(...)`; the script goes on below it."""
        if self._synchronizer is not None:
            self._synchronizer.asked_to_stop = True
        else:
            self._stop = True

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of what the recipe remembers, by parameter name. Never communicates."""
        return {
            "rank": self._transport.rank,
            "world": self._transport.world,
            "recipe": repr(self.recipe),
            "layout": self._layout,
            "links": self._transport.links,
            "step": self.steps,
            "passes": self._synchronizer.passes if self._synchronizer is not None else self._solo_steps,
            "state": self._synchronizer.remembered() if self._synchronizer is not None else {},
            "progress": self._synchronizer.progress() if self._synchronizer is not None else {},
        }

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Take up what state_dict() of the same rank, recipe and layout gave; or, where another number of workers had
        them, all of their states in order of rank: each worker then begins with the mean of what they had to send."""
        own = states[self._transport.rank if len(states) == self._transport.world else 0]
        if self._synchronizer is not None:  # each stage has a memory of its own
            self._synchronizer = self._stages.enter(own["passes"], self._parameters, self._synchronizer)
        mine = self.state_dict()
        state = reshard.taken_up(own, mine) if own["world"] == mine["world"] else reshard.fold(states, mine)
        refuse_misfit(state, mine)
        self._transport.links = state.get("links", "")
        self._solo_steps = state["step"]
        if self._synchronizer is not None and state["progress"]:
            self._synchronizer.resume(state["progress"], state["state"])
        elif self._synchronizer is not None:
            self._synchronizer.begin_at(state["step"])  # somebody alone made them

    def save(self, directory: str | os.PathLike[str], **mine: Any) -> None:
        """Write everything that a bit-exact resume needs into `directory`, one file a rank; every rank must call it.

        Model, optimizer, scaler, what the recipe remembers, positions of the world's shards, random states, and `mine`:
        numbers, text, tensors, containers of them, and whatever has a state_dict(). The last two checkpoints are kept.
        """
        if self._synchronizer is not None:
            self._synchronizer.meet_to_save()
        tree = {**coordinated.states(self._saved), "session": self.state_dict(), "mine": mine}
        about = {"gossamer": __version__, "recipe": repr(self.recipe), "layout": self._layout}
        coordinated.save(directory, self.steps, self._transport.rank, tree, about, self._tell)
        events.emit(events.Saved(step=self.steps, directory=os.fspath(directory)))

    def load(self, directory: str | os.PathLike[str]) -> dict[str, Any]:
        """Resume from the newest checkpoint in `directory` that is complete on every rank; returns what was saved as
        `mine`, or {} where there is none. Every rank must call it.

        Another number of workers may have written it, where all their files are there: one line then says what became
        of what they remembered.
        """
        found = coordinated.load(directory, self._transport.rank, self._transport.world, self._tell)
        if found is None:
            return {}
        self.load_state_dict(*found.sessions)
        coordinated.put_back(self._saved, found.tree)
        if found.news:
            self._go_on_alike(found.sessions)
            if self._transport.rank == 0:
                events.notice(found.news)
        self._first_batch.hash = NO_BATCH  # they were compared in the run that this one continues
        return dict(found.tree["mine"])

    @property
    def _saved(self) -> dict[str, Stateful]:
        """Whose state is part of a checkpoint, by its name in it."""
        scaler = {} if self.scaler is None else {"scaler": self.scaler}
        return {"model": self.model, "optimizer": self.optimizer, **scaler, "world": self._world}

    def _go_on_alike(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Where parameters are averaged, other workers than before begin with what those agreed upon."""
        agreed = reshard.agreed(states)
        copy_parameters(agreed, {name: p for name, p in self._parameters.items() if name in agreed})
        if self._synchronizer is not None:
            self._synchronizer.restart()

    def _tell(self, text: str) -> list[str]:
        return [text] if self._transport.world == 1 else self._on_lane(partial(self._transport.all_gather_text, text))

    def _broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        self._on_lane(partial(self._transport.broadcast_, tensors, source))

    def reset(self, *names: str) -> None:
        """Forget what is remembered about these parameters: after resizing them, all at once, on every rank."""
        now = trainable(self.model)
        if unknown := [name for name in names if name not in now]:
            raise AttachError(f"the model has no trainable parameters {unknown}")
        changed = [name for name, p in now.items() if name not in names and p.shape != self._shapes.get(name)]
        if changed:
            raise LayoutError(f"{changed} have other shapes now, too. Name them in the same call: reset('a', 'b').")
        if self._synchronizer is not None:
            self._synchronizer.flush()
            self._broadcast([now[name].detach() for name in names], 0)  # where they were trained apart, or made anew
        for bucket in self._synchronizer.buckets if self._synchronizer is not None else ():
            settle(bucket.state, self._at())  # parts will lie elsewhere
        old = self.state_dict()["state"]
        self._adopt(now)
        if self._synchronizer is None:
            return
        before = self._synchronizer
        before.close()
        self._synchronizer = self._stages.begin(now, self._stages.fragments(now))
        assert self._synchronizer is not None
        self._layout = layout_text(self._synchronizer.buckets)
        kept = {name: new for name, new in self._synchronizer.remembered().items() if name not in names}
        copy_state(old, {name: {key: new[key] for key in new if not is_owed(key)} for name, new in kept.items()})
        self._synchronizer.take_over_from(before)

    def _adopt(self, parameters: dict[str, Parameter]) -> None:
        self._parameters = parameters
        self._averaged_ids = {id(parameter) for parameter in parameters.values()}
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._beside = ForeignOptimizerGuard(self.model, self.optimizer, self.recipe, parameters)
        self._momentum = take_over(self.optimizer, self.recipe.compressor, parameters, self._at(), self.clip_norm)

    def close(self) -> None:
        """Leave the loop as it was found; the model and the optimizer stay as they are."""
        self._end(well=True)

    def _end(self, *, well: bool) -> None:
        if os.getpid() != self._pid or not unregister(self):
            return
        for hook in self._hooks:
            hook.remove()
        self._momentum.after()
        if self._synchronizer is not None:
            if well:
                self._synchronizer.end_run()
            self._synchronizer.close()
        events.emit(lifecycle_events.ended(self.model, self.steps, self._synchronizer))
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        """Where this session was asked to stop, the script goes on after the block, on every rank."""
        stopped = kind is not None and issubclass(kind, Stopped)
        self._end(well=kind is None or stopped)
        return stopped and (self._stop or (self._synchronizer is not None and self._synchronizer.stopping))


def leave(comm_thread: CommThread, transport: Transport, process: int) -> None:
    """End the lane, and leave the group before the interpreter ends; a forked child has no part in either."""
    if os.getpid() != process:
        return
    if comm_thread.is_here:  # garbage is collected anywhere, also amid what this would close
        threading.Thread(target=leave, args=(comm_thread, transport, process), daemon=True).start()
    else:
        comm_thread.close()
        with suppress(RuntimeError):
            transport.close()
