"""Gossip rules: the payload for neighbors, and the update from theirs (averaging, CHOCO, push-sum, NoLoCo)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from math import fsum
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.compressors.point_to_point import decode, encode
from gossamer.algorithms.topologies import Topology
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.kernels import all_finite, scratch_like
from gossamer.base.layout import FlatTensors, Layout, accumulation_dtype
from gossamer.base.ops import Payload
from gossamer.errors import AttachError, NotFinite

Memory = dict[str, Tensor]
HAT, PULL, NUMBERS, MASS, SLOW, MOMENTUM = "hat", "pull", "numbers", "mass", "slow", "momentum"


@dataclass(frozen=True)
class GossipOffer:
    """A worker's messages of a round."""

    payload: Payload  # for each neighbor that it sends to
    own: Payload = ()  # this worker's contribution to its own update, read only
    next_state: State = field(default_factory=State)  # the compressor's, after sending


class NeighborMessage(NamedTuple):
    """A neighbor's payload and its weight at this worker."""

    weight: float
    payload: Payload
    at: AggregationContext  # the sender's


class MixingRule(ABC):
    """Base class of the rules by which neighbors mix their parameters. x: (n,), concatenated, in their dtype.

    Other threads may still read payloads when `land` runs, so x, offers and messages are never modified.
    """

    @property
    def along(self) -> MixingRule:
        """The rule for averaged buffers, such as BatchNorm's statistics, which are sent uncompressed."""
        return self

    @property
    def keeps_copies(self) -> bool:
        """Whether the state has copies of values of other workers, which must begin again when the workers change."""
        return False

    def check(self, topology: Topology, world: int, seed: int) -> None:
        """Raise AttachError if the mean over workers would change: a rank's weights must sum to 1, as the columns
        always do. Also if the topology has no edges for this number of workers.
        """
        check_edges(topology, world, seed)
        rounds = range(0 if topology.mutual else topology.rounds(world))
        for number, rank in product(rounds, range(world)):
            if abs(fsum(weight for _, weight in topology.weights(rank, world, number, seed)) - 1) > 1e-9:
                raise AttachError(
                    f"with {topology!r} the weights of rank {rank} of {world} do not sum to 1, so the mean over "
                    f'workers would change. Write Gossip("push-sum") + {topology!r}.'
                )

    @abstractmethod
    def begin(self, x: Tensor) -> Memory:
        """Return the initial state; all workers have the same x."""

    @abstractmethod
    def offer(
        self, x: FlatTensors, memory: Memory, state: State, at: AggregationContext, receivers: int
    ) -> GossipOffer:
        """Return the messages for `receivers` neighbors. No state is changed, since the round may fail."""

    @abstractmethod
    def land(
        self, x: Tensor, layout: Layout, memory: Memory, offer: GossipOffer, received: Sequence[NeighborMessage]
    ) -> Tensor:
        """Return x after the round, in a new tensor; `memory` is updated."""

    def shares(self, x: Tensor, memory: Memory) -> Payload:
        """Return tensors that keep their sums over all workers in every round."""
        return (x,)

    def whole(self, means: Payload) -> Tensor:
        """Return the consensus from the means of all workers' shares."""
        return means[0]

    def joint(self, x: Tensor, memory: Memory) -> Payload:
        """Return the tensors whose means over the workers are the state of a worker that joins."""
        return self.shares(x, memory)

    def begin_from(self, means: Payload, dtype: torch.dtype) -> tuple[Tensor, Memory]:
        """Return x and the state of a worker that joins, from the means of all workers' `joint` tensors."""
        x = self.whole(means).to(dtype)
        return x, self.begin(x)


def check_edges(topology: Topology, world: int, seed: int) -> None:
    """Raise AttachError if a topology cannot be computed for this number of workers."""
    try:
        for rank in range(world):
            topology.weights(rank, world, 0, seed)
    except Exception as error:  # a topology of the user's may raise any class
        raise AttachError(
            f"{topology!r} has no edges for {world} workers ({error}). Write Exponential() or Ring(), which work with "
            "any number."
        ) from error


@dataclass(frozen=True)
class Averaging(MixingRule):
    """Send parameters uncompressed and average them.

    x_i <- x_i + step_size sum_j W_ij (x_j - x_i)
    law:    sum_i x_i is constant (columns of W sum to 1); equal x are unchanged, bit for bit
    source: Xiao & Boyd 2004, Systems & Control Letters; Lian et al. 2017, NeurIPS

    A neighbor with values that are not finite is ignored.
    """

    step_size: float = 1.0

    def begin(self, x: Tensor) -> Memory:
        return {}

    def offer(
        self, x: FlatTensors, memory: Memory, state: State, at: AggregationContext, receivers: int
    ) -> GossipOffer:
        return GossipOffer((x.flat,))

    def land(
        self, x: Tensor, layout: Layout, memory: Memory, offer: GossipOffer, received: Sequence[NeighborMessage]
    ) -> Tensor:
        change = torch.zeros_like(x, dtype=accumulation_dtype(x.dtype))
        for weight, (neighbor_parameters,), _ in received:
            if all_finite(neighbor_parameters):
                change.add_(neighbor_parameters - x, alpha=weight)
        return change.mul_(self.step_size).add_(x).to(x.dtype)


@dataclass(frozen=True)
class Choco(MixingRule):
    """CHOCO: send compressed differences to public copies, which all receivers update equally.

    q_i = C(x_i - hat_i);  hat_i <- hat_i + q_i;  pull_i <- pull_i + sum_j W_ij (q_j - q_i)
    x_i <- x_i + step_size pull_i
    law:    pull_i = sum_j W_ij (hat_j - hat_i), so sum_i x_i is constant; C = identity and step_size 1 is Averaging
    bytes:  the compressor's, once per receiver; memory: 2 N
    source: Koloskova et al. 2019, ICML; Koloskova et al. 2020, ICLR (the sums in place of copies)

    step_size is the papers' consensus step size gamma, hat_i the public copy. The error of a message is in the next
    difference, which is error feedback. Copies start as the initial parameters, equal on all workers. W must be the
    same in every round: a worker that misses a message has wrong copies from then on. If workers join or are lost, all
    copies start again from the mean of the parameters, and pull_i from zero. A worker with values that are not finite
    sends a difference of zero.
    """

    compressor: Compressor
    step_size: float

    @property
    def along(self) -> MixingRule:
        return Averaging()

    @property
    def keeps_copies(self) -> bool:
        return True

    def begin(self, x: Tensor) -> Memory:
        hat = x.to(accumulation_dtype(x.dtype), copy=True)
        return {HAT: hat, PULL: torch.zeros_like(hat)}

    def offer(
        self, x: FlatTensors, memory: Memory, state: State, at: AggregationContext, receivers: int
    ) -> GossipOffer:
        difference = FlatTensors(x.flat - memory[HAT], x.layout)
        try:
            message = encode(self.compressor, difference, state, at)
        except NotFinite:
            message = encode(self.compressor, FlatTensors(torch.zeros_like(difference.flat), x.layout), state, at)
        return GossipOffer(message.payload, (message.own(),), message.next_state)

    def land(
        self, x: Tensor, layout: Layout, memory: Memory, offer: GossipOffer, received: Sequence[NeighborMessage]
    ) -> Tensor:
        (own,), pull = offer.own, memory[PULL]
        memory[HAT].add_(own)
        message = scratch_like(pull)
        for weight, payload, at in received:
            decode(self.compressor, payload, layout, at, message)
            pull.add_(message.sub_(own), alpha=weight)
        return torch.add(x, pull, alpha=self.step_size).to(x.dtype)


@dataclass(frozen=True)
class PushSum(MixingRule):
    """Push-sum: each worker sends equal shares of its values and of its mass, and shows their ratio.

    z_i <- z_i + x_i - shown_i, the change of x_i by its optimizer;  shown_i = z_i / w_i, the x_i after the last round
    z_i <- sum_j P_ij z_j;  w_i <- sum_j P_ij w_j;  x_i <- z_i / w_i;  P_ij = 1 / (1 + out-degree of j)
    law:    sum_i z_i and sum_i w_i are constant, on any graph; gradients are those at x and steps are those of z
    bytes:  N itemsize + 8 per receiver; memory: N, at least in float32
    source: Kempe et al. 2003, FOCS; Assran et al. 2019, ICML

    A sender need not know the other senders. Values that are not finite are kept, with their mass. Payloads have the
    parameters' dtype; the remainder of z_i is kept, and x_i is rounded from it, so rounding loses no mass.
    """

    def check(self, topology: Topology, world: int, seed: int) -> None:
        """Accept any graph."""
        check_edges(topology, world, seed)

    def begin(self, x: Tensor) -> Memory:
        return {
            NUMBERS: x.to(accumulation_dtype(x.dtype), copy=True),
            MASS: torch.ones(1, dtype=torch.float64, device=x.device),
        }

    def offer(
        self, x: FlatTensors, memory: Memory, state: State, at: AggregationContext, receivers: int
    ) -> GossipOffer:
        numbers, mass = self.shares(x.flat, memory)
        part, lighter = (numbers / (1 + receivers)).to(x.flat.dtype), mass / (1 + receivers)
        if not all_finite(part):
            return GossipOffer((torch.zeros_like(part), torch.zeros_like(mass)), (numbers, mass))
        return GossipOffer((part, lighter), (numbers.sub_(part, alpha=receivers), lighter))

    def land(
        self, x: Tensor, layout: Layout, memory: Memory, offer: GossipOffer, received: Sequence[NeighborMessage]
    ) -> Tensor:
        numbers, mass = offer.own
        memory[NUMBERS].copy_(numbers)
        memory[MASS].copy_(mass)
        for _, (neighbor_numbers, neighbor_mass), _ in received:
            memory[NUMBERS].add_(neighbor_numbers)
            memory[MASS].add_(neighbor_mass)
        return self._shown(x, memory)

    def shares(self, x: Tensor, memory: Memory) -> Payload:
        moved = x.to(memory[NUMBERS].dtype) - self._shown(x, memory)
        return moved.add_(memory[NUMBERS]), memory[MASS].clone()

    def whole(self, means: Payload) -> Tensor:
        numbers, mass = means
        return numbers / mass.to(numbers.dtype)

    def begin_from(self, means: Payload, dtype: torch.dtype) -> tuple[Tensor, Memory]:
        numbers, mass = means
        memory = {NUMBERS: numbers.clone(), MASS: mass.clone()}
        return self.whole(means).to(dtype), memory

    def _shown(self, x: Tensor, memory: Memory) -> Tensor:
        """Return x after the last round, with the same bits each time."""
        return (memory[NUMBERS] / memory[MASS].to(memory[NUMBERS].dtype)).to(x.dtype)


@dataclass(frozen=True)
class OuterMomentum(MixingRule):
    """NoLoCo's rule: an outer momentum step on the mean over neighbors, and consensus of the slow parameters.

    Delta_i = x_i - slow_i;  mean_i(y) = y_i + sum_j W_ij (y_j - y_i)
    delta_i <- momentum delta_i + learning_rate mean_i(Delta) + pull (mean_i(slow) - slow_i)
    slow_i <- slow_i + delta_i;  x_i <- slow_i
    law:    the means over workers follow momentum SGD: pull does not change them (columns of W sum to 1)
    bytes:  2 N itemsize, at least in float32, per receiver; memory: 2 N
    source: Kolehmainen et al. 2025, arXiv:2506.10911 (NoLoCo), with the sign of its proof and program

    A neighbor with values that are not finite is ignored.
    """

    learning_rate: float
    momentum: float
    pull: float

    @property
    def along(self) -> MixingRule:
        return Averaging()

    def begin(self, x: Tensor) -> Memory:
        slow = x.to(accumulation_dtype(x.dtype), copy=True)
        return {SLOW: slow, MOMENTUM: torch.zeros_like(slow)}

    def offer(
        self, x: FlatTensors, memory: Memory, state: State, at: AggregationContext, receivers: int
    ) -> GossipOffer:
        slow = memory[SLOW].clone()
        numbers = slow, x.flat.to(slow.dtype) - slow
        return GossipOffer(numbers, numbers)

    def land(
        self, x: Tensor, layout: Layout, memory: Memory, offer: GossipOffer, received: Sequence[NeighborMessage]
    ) -> Tensor:
        slow, delta = offer.own
        change = delta * self.learning_rate
        for weight, (neighbor_slow, neighbor_delta), _ in received:
            if all_finite(neighbor_slow) and all_finite(neighbor_delta):
                change.add_(neighbor_delta - delta, alpha=weight * self.learning_rate)
                change.add_(neighbor_slow - slow, alpha=weight * self.pull)
        memory[SLOW].add_(memory[MOMENTUM].mul_(self.momentum).add_(change))
        return memory[SLOW].to(x.dtype, copy=True)

    def joint(self, x: Tensor, memory: Memory) -> Payload:
        return x, memory[SLOW], memory[MOMENTUM]

    def begin_from(self, means: Payload, dtype: torch.dtype) -> tuple[Tensor, Memory]:
        x, slow, momentum = means
        return x.to(dtype), {SLOW: slow.clone(), MOMENTUM: momentum.clone()}
