"""Parameter averaging: workers train their own parameters and average them periodically (LocalSGD, DiLoCo)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.algorithms.strategies import AGREED, ALIGN, FROM, RESET, AveragingStrategy, Memory
from gossamer.algorithms.strategies.diloco import restore_lengths, split_lengths
from gossamer.base.layout import FlatTensors, accumulation_dtype
from gossamer.errors import AttachError
from gossamer.train.checkpoint.state import MERGING_PREFIX
from gossamer.train.engine.averaged_state import AveragedState, averaged_keys, optimizer_state_tensors
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.loop import LoopState
from gossamer.train.engine.step_decision import Presence
from gossamer.train.moments.aligned_moment import align_first_moments, check_alignable
from gossamer.train.moments.shared_variance import share_variance
from gossamer.train.synchronizers.base import NamedState
from gossamer.train.synchronizers.in_flight import InFlightRound, RoundResult, RoundTask, taken_along


class ParameterAveraging(RoundTask):
    """Offers this worker's parameter change (the pseudo-gradient), and applies the strategy's update to its mean.

    Args:
        guards_gradients: drop non-finite gradients here, before the optimizer uses them.
    """

    def __init__(
        self,
        strategy: AveragingStrategy,
        fragments: Sequence[Sequence[Bucket]],
        optimizer: Optimizer | None,
        loop: LoopState,
        *,
        guards_gradients: bool = True,
        merges_own: bool = False,
    ) -> None:
        self._strategy, self._fragments, self._optimizer, self._loop = strategy, fragments, optimizer, loop
        self.keeps_offers, self.guards_gradients, self.merges_own = strategy.needs_own, guards_gradients, merges_own
        if optimizer is None and (strategy.moments.any or strategy.on_merge in (ALIGN, RESET)):
            raise AttachError(
                f"{strategy!r} averages, aligns or resets the optimizer's state, and a session of arrays does not know "
                "the optimizer. Leave out optimizer_state and the periods of moments."
            )
        if optimizer is not None and strategy.on_merge == ALIGN:
            check_alignable(optimizer)
        self._shares_second_moment = strategy.moments.shared_divisor
        self._reads = strategy.reads_parameters or strategy.on_merge == ALIGN
        self._rounds = {} if optimizer is None else averaged_keys(optimizer, strategy.moments)
        self._memory: dict[Bucket, Memory] = {
            bucket: strategy.begin(bucket.gather_parameters(bucket.flat)) for buckets in fragments for bucket in buckets
        }
        self._lengths = {bucket: _room_for_lengths(bucket) for bucket in self._memory} if strategy.radial else {}
        self.agreed_state = AveragedState.of(loop.averaged()).held()

    @property
    def agreed(self) -> Mapping[str, Tensor]:
        parameters = {
            slot.name: slot.view(memory[AGREED]) for bucket, memory in self._memory.items() for slot in bucket.layout
        }
        return {**parameters, **self.agreed_state}

    @torch.no_grad()
    def offer(self, bucket: Bucket, presence: Presence) -> Tensor:
        flat = bucket.gather_parameters(None if self.keeps_offers else bucket.flat)
        self._strategy.offer(flat, self._memory[bucket])
        if self._lengths:
            self._lengths[bucket].copy_(split_lengths(flat, bucket.layout.sizes))
        return flat

    def averaged_state(self, number: int, landed: InFlightRound | None = None) -> AveragedState:
        """State that is averaged with round `number`: the model's other state with the first fragment; optimizer
        moments with their parameters, each in every n-th of their rounds."""
        turn, fragment = divmod(number, len(self._fragments))
        kinds = [key for key, rounds in self._rounds.items() if (turn + 1) % rounds == 0]
        held = taken_along(self._loop.averaged(), landed) if fragment == 0 else {}
        parameters = [p for bucket in self._fragments[fragment] for p in bucket.parameters.values()]
        lengths = [self._lengths[bucket] for bucket in self._fragments[fragment] if self._lengths]
        moments = () if self._optimizer is None else optimizer_state_tensors(self._optimizer, parameters, kinds)
        return AveragedState.of(held, [*moments, *lengths])

    def apply(self, landed: InFlightRound, result: RoundResult) -> None:
        if self._lengths:
            self._restore_lengths(landed, result)
        for outgoing, mean, own in zip(landed.outgoing, result.means, result.owns, strict=True):
            bucket = outgoing.bucket
            flat = bucket.gather_parameters() if self._reads else mean
            if self._strategy.on_merge == ALIGN:
                self._align(bucket, mean, self._memory[bucket][AGREED] - flat, landed, result.mean_steps)
            self._strategy.land(flat, self._memory[bucket], mean, own)
            self._write(bucket, flat)
        if result.averaged_state is not None:
            averaged = self.averaged_state(landed.number, landed)
            averaged.replace(result.averaged_state, self._strategy.kept_share, landed.sent)
            self.agreed_state = {**self.agreed_state, **averaged.named(result.averaged_state)}
            if self._shares_second_moment:
                self._share_second_moment(landed)
        if self._optimizer is not None and self._strategy.on_merge == RESET:
            for outgoing in landed.outgoing:
                for parameter in outgoing.bucket.parameters.values():
                    self._optimizer.state.pop(parameter, None)

    def _align(self, bucket: Bucket, mean: Tensor, offered: Tensor, landed: InFlightRound, mean_steps: float) -> None:
        """Shift this worker's momenta by the difference of the workers' mean step to its own, in units of a step.

        Where local steps follow the speeds, the mean of the workers' changes is divided by their mean number of steps.
        """
        if self._optimizer is not None:
            turn, schedule = landed.number // len(self._fragments), self._strategy.schedule
            steps = schedule.period if turn else schedule.sync_round(landed.number).launch
            if landed.steps and mean_steps:
                mean, steps = mean * (landed.steps / mean_steps), landed.steps
            views = FlatTensors(mean - offered, bucket.layout)
            align_first_moments(self._optimizer, {p: views[name] for name, p in bucket.parameters.items()}, steps)

    def _restore_lengths(self, landed: InFlightRound, result: RoundResult) -> None:
        """Rescale averaged directions to the averaged lengths, the last values of the averaged state."""
        assert result.averaged_state is not None
        counts = [len(outgoing.layout.sizes) for outgoing in landed.outgoing]
        lengths = result.averaged_state[-sum(counts) :].split(counts)
        for outgoing, mean, each in zip(landed.outgoing, result.means, lengths, strict=True):
            restore_lengths(mean, outgoing.layout.sizes, each)

    def _share_second_moment(self, landed: InFlightRound) -> None:
        """Let local steps divide by the averaged second moment from now on, in rounds that averaged it."""
        moments, turn = self._strategy.moments, landed.number // len(self._fragments)
        if self._optimizer is not None and (turn + 1) % moments.second == 0:
            parameters = [p for outgoing in landed.outgoing for p in outgoing.bucket.parameters.values()]
            share_variance(self._optimizer, parameters, keeps_largest=moments.keeps_largest)

    def revert(self, landed: InFlightRound) -> None:
        for outgoing in landed.outgoing:
            self._strategy.undo(self._memory[outgoing.bucket], outgoing.flat)

    @property
    def state(self) -> NamedState:
        found: NamedState = {}
        for bucket, memory in self._memory.items():
            for key, flat in memory.items():
                for name, view in FlatTensors(flat, bucket.layout).items():
                    found.setdefault(name, {})[MERGING_PREFIX + key] = view
        return found

    @torch.no_grad()
    def adopt_memory(self) -> None:
        for bucket, memory in self._memory.items():
            self._write(bucket, memory.get(FROM, memory[AGREED]))

    def _write(self, bucket: Bucket, flat: Tensor) -> None:
        with self._loop.copies.following(bucket.parameters.values()):
            bucket.scatter_parameters(flat)

    @torch.no_grad()
    def restart(self) -> None:
        """Restart from new parameters. If these are the mean of the workers' own, they contain unsent residuals."""
        self.agreed_state = AveragedState.of(self._loop.averaged()).held()
        for bucket, memory in self._memory.items():
            self._strategy.restart(bucket.gather_parameters(), memory)
            if self.merges_own:
                for unsent in bucket.unsent:
                    unsent.zero_()


def _room_for_lengths(bucket: Bucket) -> Tensor:
    return bucket.flat.new_zeros(len(bucket.layout.sizes), dtype=accumulation_dtype(bucket.flat.dtype))
