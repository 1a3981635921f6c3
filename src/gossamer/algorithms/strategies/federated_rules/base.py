"""Base of federated strategies: one round as pure rules on flat tensors, on the device and on the server."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, DeMo, Dense, Feedback, Route, point_to_point
from gossamer.algorithms.compressors.distortion import SAMPLE, relative_error
from gossamer.algorithms.gossip.rules import Memory as Memory
from gossamer.algorithms.strategies.base import FederatedStage, Stage, Strategy
from gossamer.algorithms.strategies.federated_rules.aggregator import Aggregator, WeightedMean
from gossamer.algorithms.strategies.federated_rules.privacy.terms import Privacy
from gossamer.algorithms.strategies.federated_rules.secure_aggregation import SecureAggregation
from gossamer.algorithms.strategies.parameter_server import MATRIX, MOST_LOST
from gossamer.algorithms.topologies import Complete, Topology
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors
from gossamer.errors import RecipeError, require


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """The local training of a device in a round."""

    samples: int  # trained on
    steps: int  # of the device's optimizer
    learning_rate: float = 0.0  # of the device's optimizer, mean over the steps


@dataclass(frozen=True, kw_only=True)
class CohortSummary:
    """Statistics of the contributions that the server applies."""

    contributions: int  # number of combined contributions
    clients: int  # of the whole federation
    steps: float  # weighted mean over the contributions
    square_steps: float | None = None  # weighted mean of their squares; None: all made equally many
    mean_weight: float = 1.0  # of a contribution


@dataclass(frozen=True, kw_only=True, repr=False)
class FederatedStrategy(Strategy, ABC):
    """Base class of federated strategies: rounds of a server and devices that hold their own data.

    A device sends a *contribution*: one or more flat tensors (n,) in the layout of the model's parameters, the first of
    which is the pseudo-gradient, the round's parameters minus the trained ones (positive is the descent direction). The
    server makes one step with their mean. See FedAvg for the arguments.
    """

    fraction: float = 0.1  # of all clients that train in a round
    local_steps: int | None = None  # of the device's optimizer in a round
    local_epochs: int | None = None  # passes over the device's data; neither: 1
    pull: Compressor | None = None  # of differences between versions; None: uncompressed parameters
    aggregator: Aggregator = WeightedMean()  # of a cohort's contributions
    secure: SecureAggregation | None = None  # masks that hide each contribution from the server
    privacy: Privacy | None = None  # limits the information about any one device in versions
    stale_after: int | None = None  # versions after which a residual is dropped; None: never

    def __post_init__(self) -> None:
        name = type(self).__name__
        require(
            0 < self.fraction <= 1,
            f"fraction must be the fraction of clients in a round, above 0 and at most 1, got {self.fraction}. Write "
            f"{name}(fraction=0.1).",
        )
        require(
            self.local_steps is None or self.local_epochs is None,
            f"local_steps and local_epochs cannot be combined. Write {name}(local_steps="
            f"{self.local_steps}) or {name}(local_epochs={self.local_epochs}).",
        )
        for field in ("local_steps", "local_epochs", "stale_after"):
            value = getattr(self, field)
            require(value is None or value >= 1, f"{field} must be 1 or more, got {value}. Write {name}({field}=1).")

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (FederatedStage(0, self),)

    @property
    def agrees_on_means(self) -> bool:
        return False

    @property
    def asynchronous(self) -> bool:
        """Whether devices start from the current version at any time, without rounds."""
        return False

    @property
    def epochs(self) -> int | None:
        """Passes over a device's data; None if steps are counted."""
        return None if self.local_steps is not None else self.local_epochs or 1

    @property
    def pull_compressor(self) -> Compressor | None:
        """`pull` for tensors of every shape, without feedback: the error of one difference is in the next."""
        return self.pull if self.pull is None or self.pull.handles_every_shape else Route(self.pull)

    def cohort(self, clients: int) -> int:
        """Return the number of `clients` that train in a round."""
        return min(max(ceil(self.fraction * clients - 1e-9), 1), clients)

    def contributions_per_version(self, clients: int) -> int:
        """Return the number of contributions per version."""
        return self.cohort(clients)

    @property
    def oldest_staleness(self) -> int | None:
        """Largest age of a contribution, in versions made while its device trained; None: no limit."""
        return None

    # On the device.

    @property
    def memory_keys(self) -> Sequence[str]:
        """Keys of the state that a device keeps between its rounds: tensors (n,), initially zero."""
        return ()

    @property
    def shared_keys(self) -> Sequence[str]:
        """Keys of the tensors (n,) that the server publishes with the parameters; initially zero, kept there."""
        return ()

    @property
    def changes_gradients(self) -> bool:
        """Whether `correct` changes gradients."""
        return False

    @property
    def why_plain_sgd(self) -> str | None:
        """The reason why devices must train by SGD without momentum; None: any optimizer."""
        return None

    @property
    def uses_learning_rate(self) -> bool:
        """Whether contributions depend on the device's learning rate, which must then be equal for all parameters."""
        return False

    def correct(self, gradient: Tensor, parameters: Tensor, anchor: Tensor, shared: Memory, memory: Memory) -> None:
        """Change a gradient in place before a step of the device's optimizer.

        Args:
            gradient: view (m,) of the gradient; the other tensors are views of the same elements.
            parameters: the device's current parameters.
            anchor: the round's parameters.
            shared: tensors that the server published, by `shared_keys`.
            memory: the device's state, by `memory_keys`.
        """

    def contribute(
        self, pseudo_gradient: Tensor, work: LocalWork, shared: Memory, memory: Memory
    ) -> tuple[tuple[Tensor, ...], Memory]:
        """Return the contribution after local training, and the device's state to commit once the contribution counts.

        pseudo_gradient: (n,), which may be overwritten. shared, memory: read only.
        """
        return (pseudo_gradient,), memory

    # On the server.

    @property
    def contribution_count(self) -> int:
        """Number of tensors (n,) in a contribution."""
        return 1

    @property
    def needs_steps(self) -> bool:
        """Whether `apply` needs the number of steps that devices made."""
        return False

    def weight(self, work: LocalWork, staleness: int) -> float:
        """Return the weight of a contribution, positive. staleness: its age in versions."""
        return float(work.samples)

    def server_memory(self, parameters: Tensor) -> Memory:
        """Return the server's initial state, including `shared_keys`."""
        return {key: torch.zeros_like(parameters) for key in self.shared_keys}

    def apply(self, parameters: Tensor, memory: Memory, means: Sequence[Tensor], cohort: CohortSummary) -> None:
        """Overwrite `parameters` and `memory` with the next version. means: `contribution_count` tensors (n,)."""
        parameters.sub_(means[0])

    # Combinations that are rejected.

    def check(self, compressor: Compressor, topology: Topology) -> None:
        if topology != Complete():
            raise RecipeError(
                f"with {self!r} devices exchange messages with the server only, so {topology!r} would have no effect. "
                "Omit it."
            )
        if self.pull is not None:
            check_pull(self.pull)
        refused = self._refused_aggregator(compressor) or self._refused_secure(compressor)
        if refused:
            raise RecipeError(refused)
        if self.privacy is not None:
            self.privacy.check(self, compressor)

    def _refused_aggregator(self, compressor: Compressor) -> str | None:
        """Return the reason why the aggregator cannot be combined with the other terms, and the line to write."""
        linear = replace(self, aggregator=WeightedMean())
        if self.contribution_count > 1 and not self.aggregator.is_linear:
            return (
                f"{self.aggregator!r} excludes some contributions, and with {type(self).__name__} the server keeps the "
                f"sum of all devices' states, which would become wrong. Write {linear!r}, or "
                f"FedAvg(aggregator={self.aggregator!r})."
            )
        sparse = few_entries(compressor) if self.aggregator.by_entry else None
        if sparse is not None:
            return (
                f"{sparse!r} sends few entries, so for any one entry most devices send zero, and "
                f"{self.aggregator!r} would return zero: the model would not change. Write {self!r} + Int8(), or "
                f"{replace(self, aggregator=WeightedMean())!r} + {sparse!r}."
            )
        if self.secure is not None and not self.aggregator.is_linear:
            return (
                f"{self.aggregator!r} compares single contributions, and under {self.secure!r} the server receives "
                f"their sum only. Write {linear!r}, or {replace(self, secure=None)!r}."
            )
        return None

    def _refused_secure(self, compressor: Compressor) -> str | None:
        """Return the reason why masks cannot be combined with the other terms, and the line to write."""
        if self.secure is None:
            return None
        plain = replace(self, secure=None)
        if self.asynchronous:
            return (
                f"{self.secure!r} needs a cohort of devices with masks that cancel, and with {type(self).__name__} "
                f"each device reports separately. Write FedAvg(secure={self.secure!r}), or {plain!r}."
            )
        if self.needs_steps:
            return (
                f"{type(self).__name__} weights by the steps of each device, and under {self.secure!r} the server "
                f"receives sums only. Write FedAvg(secure={self.secure!r}), or {plain!r}."
            )
        return self.secure.refuses(compressor)


# -- compressors of a federation ---------------------------------------------------------------------------------------


FEW = 0.5  # share of a tensor's entries; below it, most devices send no value for a given entry


def check_pull(pull: Compressor) -> None:
    """Raise RecipeError for a compressor that cannot encode differences between versions."""
    if pull == Dense():
        raise RecipeError("pull=Dense() is the default. Omit it.")
    if isinstance(pull, Feedback | DeMo):
        raise RecipeError(
            f"pull={pull!r}: pull sends differences to the devices' parameters; the error of one is in the next, and "
            f"{type(pull).__name__} would send it twice. Write pull={getattr(pull, 'inner', None) or 'Int8()'!r}."
        )
    if pull.owns_momentum(MATRIX) is not None:
        raise RecipeError(
            f"pull={pull!r} applies an optimizer's momentum to gradients, and pull sends parameters. Write pull=Int8()."
        )
    lost = relative_error(pull, "lost")
    if not lost <= MOST_LOST:
        raise RecipeError(
            f"pull={pull!r} has a relative error of {lost:.1f} on random numbers, so differences that are "
            "sent again in each version would grow without limit. Write pull=Int8(), or pull=TopK(density=0.01)."
        )


@lru_cache(maxsize=64)
def few_entries(compressor: Compressor) -> Compressor | None:
    """Return the sparse compressor in a recipe's compressor, which sends few of a matrix's entries; None if there is no
    such.
    """
    numbers = torch.randn(SAMPLE.numel, generator=rng.generator("entries that are sent"), device="cpu")
    x, at = FlatTensors(numbers, SAMPLE), AggregationContext()
    own = point_to_point.encode(compressor, x, point_to_point.begin(compressor, x, at), at).own()
    if int(own.count_nonzero()) >= FEW * SAMPLE.numel:
        return None
    terms = [term for term in compressor.held() if isinstance(term, Compressor)]
    return next((term for term in terms if not isinstance(term, Route | Feedback)), compressor)
