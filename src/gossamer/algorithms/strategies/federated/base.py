"""Base of federated strategies: one round as pure rules on flat tensors, on the device and on the server."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Route
from gossamer.algorithms.gossip.rules import Memory as Memory
from gossamer.algorithms.strategies.base import FederatedStage, Stage, Strategy
from gossamer.algorithms.strategies.federated.aggregator import Aggregator, WeightedMean
from gossamer.algorithms.strategies.federated.combinations import check_pull, few_entries
from gossamer.algorithms.strategies.federated.privacy.terms import Privacy
from gossamer.algorithms.strategies.federated.secure_aggregation import SecureAggregation
from gossamer.algorithms.topologies import Complete, Topology
from gossamer.errors import RecipeError, require


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """What a device did in a round."""

    samples: int  # that it trained on
    steps: int  # of its optimizer
    learning_rate: float = 0.0  # of its optimizer, the mean over the steps


@dataclass(frozen=True, kw_only=True)
class CohortSummary:
    """What the server knows of the contributions that it applies."""

    contributions: int  # that were combined
    clients: int  # of the whole federation
    steps: float  # weighted mean over the contributions
    square_steps: float | None = None  # weighted mean of their squares; None: all made equally many
    mean_weight: float = 1.0  # of a contribution


@dataclass(frozen=True, kw_only=True, repr=False)
class FederatedStrategy(Strategy, ABC):
    """Rounds of a server and devices that hold their own data.

    A device's part is a *contribution*: one or more flat tensors (n,) like the model's parameters, the first of which
    is the pseudo-gradient, the round's parameters minus the trained ones (positive is downhill). The server's part is
    one step with their mean.
    """

    fraction: float = 0.1  # of all clients that train in a round
    local_steps: int | None = None  # of the device's optimizer in a round
    local_epochs: int | None = None  # passes over the device's data; neither: 1
    pull: Compressor | None = None  # of differences between versions that devices know; None: parameters as they are
    aggregator: Aggregator = WeightedMean()  # of a cohort's contributions
    secure: SecureAggregation | None = None  # masks that hide each contribution from the server
    privacy: Privacy | None = None  # bounds what versions tell of any one device
    stale_after: int | None = None  # versions after which what feedback owes is dropped; None: it is kept

    def __post_init__(self) -> None:
        name = type(self).__name__
        require(
            0 < self.fraction <= 1,
            f"fraction is the share of clients in a round, above 0 and at most 1, not {self.fraction}: write "
            f"{name}(fraction=0.1)",
        )
        require(
            self.local_steps is None or self.local_epochs is None,
            f"local_steps and local_epochs both say how long a device trains: write {name}(local_steps="
            f"{self.local_steps}) or {name}(local_epochs={self.local_epochs})",
        )
        for field in ("local_steps", "local_epochs", "stale_after"):
            value = getattr(self, field)
            require(value is None or value >= 1, f"{field} is 1 or more, not {value}: write {name}({field}=1)")

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (FederatedStage(0, self),)

    @property
    def agrees_on_means(self) -> bool:
        return False

    @property
    def asynchronous(self) -> bool:
        """Whether devices begin from whatever version there is, and no round is waited for."""
        return False

    @property
    def epochs(self) -> int | None:
        """Passes over a device's data; None where steps are counted."""
        return None if self.local_steps is not None else self.local_epochs or 1

    @property
    def pull_compressor(self) -> Compressor | None:
        """`pull` for tensors of every shape. Without feedback: what one difference loses is in the next, and with both
        it would be sent twice."""
        return self.pull if self.pull is None or self.pull.handles_every_shape else Route(self.pull)

    def cohort(self, clients: int) -> int:
        """How many of so many clients train in a round."""
        return min(max(ceil(self.fraction * clients - 1e-9), 1), clients)

    def contributions_per_version(self, clients: int) -> int:
        """Of how many contributions a version is made."""
        return self.cohort(clients)

    @property
    def oldest_staleness(self) -> int | None:
        """Versions made while a device trained, beyond which its contribution does not count; None: it always does."""
        return None

    # On the device.

    @property
    def memory_keys(self) -> Sequence[str]:
        """What a device remembers between its rounds: tensors (n,), zero at first."""
        return ()

    @property
    def shared_keys(self) -> Sequence[str]:
        """What the server publishes beside the parameters: tensors (n,), zero at first, kept in its memory."""
        return ()

    @property
    def changes_gradients(self) -> bool:
        """Whether `correct` does anything."""
        return False

    @property
    def why_plain_sgd(self) -> str | None:
        """Why devices have to train by SGD without momentum; None: they may by any optimizer."""
        return None

    @property
    def uses_learning_rate(self) -> bool:
        """Whether a contribution follows from the device's learning rate, so that it has to be one for all
        parameters."""
        return False

    def correct(self, gradient: Tensor, parameters: Tensor, anchor: Tensor, shared: Memory, memory: Memory) -> None:
        """Change a gradient in place before a step of the device's optimizer. All: views (m,) of the same elements.

        anchor: the round's parameters. shared: what the server published under `shared_keys`. memory: the device's.
        """

    def contribute(
        self, pseudo_gradient: Tensor, work: LocalWork, shared: Memory, memory: Memory
    ) -> tuple[tuple[Tensor, ...], Memory]:
        """The contribution after local training, and what the device's memory becomes once it counts.

        pseudo_gradient: (n,), which may be overwritten. shared, memory: only read.
        """
        return (pseudo_gradient,), memory

    # On the server.

    @property
    def contribution_count(self) -> int:
        """How many tensors (n,) a contribution has."""
        return 1

    @property
    def needs_steps(self) -> bool:
        """Whether `apply` asks how many steps devices made."""
        return False

    def weight(self, work: LocalWork, staleness: int) -> float:
        """The weight of a contribution, positive. staleness: versions made since the one it was computed from."""
        return float(work.samples)

    def server_memory(self, parameters: Tensor) -> Memory:
        """The server's memory at first, `shared_keys` among it."""
        return {key: torch.zeros_like(parameters) for key in self.shared_keys}

    def apply(self, parameters: Tensor, memory: Memory, means: Sequence[Tensor], cohort: CohortSummary) -> None:
        """Overwrite `parameters` and `memory` with the next version. means: `contribution_count` tensors (n,)."""
        parameters.sub_(means[0])

    # What does not go together.

    def check(self, compressor: Compressor, topology: Topology) -> None:
        if topology != Complete():
            raise RecipeError(
                f"with {self!r} devices talk to the server only, so {topology!r} would change nothing. Leave it out."
            )
        if self.pull is not None:
            check_pull(self.pull)
        refused = self._refused_aggregator(compressor) or self._refused_secure(compressor)
        if refused:
            raise RecipeError(refused)
        if self.privacy is not None:
            self.privacy.check(self, compressor)

    def _refused_aggregator(self, compressor: Compressor) -> str | None:
        """Why its aggregator does not go together with the rest, and the line to write instead."""
        linear = replace(self, aggregator=WeightedMean())
        if self.contribution_count > 1 and not self.aggregator.is_linear:
            return (
                f"{self.aggregator!r} leaves out what some devices sent, and with {type(self).__name__} the server "
                f"keeps the sum of what all devices remember, which would no longer be one. Write {linear!r}, or "
                f"FedAvg(aggregator={self.aggregator!r})."
            )
        sparse = few_entries(compressor) if self.aggregator.by_entry else None
        if sparse is not None:
            return (
                f"{sparse!r} sends few entries, so of any one entry most devices send nothing, which is what "
                f"{self.aggregator!r} takes for the truth: the model would stand still. Write {self!r} + Int8(), or "
                f"{replace(self, aggregator=WeightedMean())!r} + {sparse!r}."
            )
        if self.secure is not None and not self.aggregator.is_linear:
            return (
                f"{self.aggregator!r} compares what single devices sent, and under {self.secure!r} the server learns "
                f"their sum only. Write {linear!r}, or {replace(self, secure=None)!r}."
            )
        return None

    def _refused_secure(self, compressor: Compressor) -> str | None:
        """Why masks do not go together with the rest, and the line to write instead."""
        if self.secure is None:
            return None
        plain = replace(self, secure=None)
        if self.asynchronous:
            return (
                f"{self.secure!r} hides devices in a cohort whose masks cancel, and with {type(self).__name__} each "
                f"device reports by itself, to no cohort. Write FedAvg(secure={self.secure!r}), or {plain!r}."
            )
        if self.needs_steps:
            return (
                f"{type(self).__name__} weighs by how many steps each device made, and under {self.secure!r} the "
                f"server learns sums only. Write FedAvg(secure={self.secure!r}), or {plain!r}."
            )
        return self.secure.refuses(compressor)
