"""User-level differential privacy of a federation: clipping and noise limit the information about any one device.

The unit is a device with all its data: an observer can distinguish federations with and without its data with odds of
at most exp(epsilon), except with probability delta. Metrics, numbers of samples and times that devices report are not
protected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from math import ceil, inf
from typing import TYPE_CHECKING, ClassVar

import torch

from gossamer.algorithms.compressors import Compressor, point_to_point
from gossamer.algorithms.strategies.federated_rules.privacy.epsilon import (
    INTEGER_ORDERS,
    ORDERS,
    PLD,
    RDP,
    discrete_gaussian_divergence,
    gaussian_epsilon,
    renyi_epsilon,
    sampled_gaussian_epsilon,
    skellam_divergence,
)
from gossamer.algorithms.strategies.federated_rules.privacy.integer_grid import IntegerGrid
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.term import Term
from gossamer.errors import RecipeError, require

if TYPE_CHECKING:
    from gossamer.algorithms.strategies.federated_rules.base import FederatedStrategy

POISSON, FIXED = "poisson", "fixed"  # sampling of a cohort
SKELLAM, DISCRETE_GAUSSIAN = "skellam", "discrete-gaussian"
SAMPLE = Layout.of({"weight": (1024, 1024), "bias": (1024,), "scale": (1,)})  # one of each kind for Route
TABLE_DISTANCE = 1e-30  # total variation distance of an integer drawn from a table to its distribution


@dataclass(frozen=True, repr=False)
class Privacy(Term, ABC):
    """Base class of user-level differential privacy: all tensors of a contribution are clipped together; noise is
    added.
    """

    kind = "privacy"

    noise: float  # noise multiplier: standard deviation relative to the largest change by one device
    delta: float = 1e-5  # probability that epsilon does not hold; below one over the number of clients
    budget: float | None = None  # epsilon after which no round starts; None: no limit

    def __post_init__(self) -> None:
        name = type(self).__name__
        require(self.noise > 0, f"noise must be above 0, got {self.noise}. Write {name}(noise=1.0).")
        require(0 < self.delta < 1, f"delta must be between 0 and 1, got {self.delta}. Write {name}(delta=1e-5).")
        require(
            self.budget is None or self.budget > 0,
            f"budget must be an epsilon above 0, got {self.budget}. Write {name}(noise={self.noise}, budget=4.0).",
        )

    @property
    def on_device(self) -> bool:
        """Whether devices clip and add noise themselves, and send nothing else to the server."""
        return True

    @property
    def spent_by_tasks(self) -> bool:
        """Whether every task given to a device costs privacy, also one that contributes to no version."""
        return False

    def amplifies(self, cohort: int, clients: int, *, feedback: bool) -> bool:
        """Whether the accounting uses amplification by sampling: a device trains in some rounds only, unknown to
        observers.

        feedback: whether devices keep state between rounds, so that a round reveals earlier ones.
        """
        return False

    @abstractmethod
    def epsilon_after(
        self, rounds: int, cohort: int, clients: int, *, feedback: bool = False, entries: int = 1, bits: int = 32
    ) -> float:
        """Return epsilon, at `delta`, after `rounds` rounds with cohorts of `cohort` of `clients` devices.

        Without amplification by sampling, the result is for a device in all of these rounds.

        Args:
            rounds: number of rounds; without amplification, the number of rounds of one device.
            cohort: devices per round.
            clients: devices of the federation.
            feedback: whether devices keep state between rounds.
            entries: entries of a contribution, if integers are summed.
            bits: bits of each summand, if integers are summed.
        """

    def check(self, strategy: FederatedStrategy, compressor: Compressor) -> None:
        """Raise RecipeError for a strategy under which one device can change more than the accounting includes."""
        if not strategy.aggregator.is_linear:
            raise RecipeError(
                f"{strategy.aggregator!r} selects among contributions, and one device may change the selection: by "
                f"more than the clip norm over the cohort, for which {self!r} adds noise. Omit aggregator=: "
                "clipping limits outliers."
            )
        if strategy.asynchronous:
            raise RecipeError(
                f"{strategy!r} uses contributions as they arrive, possibly several of one device for one version, "
                f"and {self!r} adds noise for one of each. Write FedAvg(privacy={self!r})."
            )
        if strategy.needs_steps:
            raise RecipeError(
                f"{type(strategy).__name__} scales its step by the number of steps that devices report without noise. "
                f"Write FedAvg(privacy={self!r})."
            )
        secure = strategy.secure is not None
        if secure and not isinstance(self, DistributedPrivacy):
            raise RecipeError(
                "Under SecureAggregation the server cannot clip single contributions, and noise must consist "
                f"of integers. Write privacy=DistributedPrivacy(noise={self.noise}, clip=1.0)."
            )


@dataclass(frozen=True, repr=False)
class CentralPrivacy(Privacy):
    """Central differential privacy: the server clips each contribution to norm S and adds Gaussian noise to their sum.

    mean = (sum_i x_i min(1, S / |x_i|) + N(0, (z S)^2)) / (q W), for W devices that are sampled with probability q each
    law:    every device has weight 1, and one of W changes the sum by at most S; q W is the expected number of devices
    clip:   None adapts S to a quantile of the norms: S <- S exp(-rate (b - quantile)), b: the fraction of norms up to
            S, with separate noise; the noise of the sum is increased so that both together cost as much as z alone
    bytes:  none
    source: McMahan et al. 2018, ICLR (DP-FedAvg); clip=None: Andrew et al. 2021, NeurIPS

    Devices trust the server. z is the noise multiplier, q the sampling probability. Clipping is the last operation
    before the noise, on the decoded message. The clipped part is discarded: the residual of feedback contains
    compression errors only; otherwise the data of one round would be revealed in several.

    sampling="poisson" samples each device independently. Amplification by sampling then reduces epsilon, since
    observers do not know the sample. It is not used if devices keep state (feedback, SCAFFOLD), so that a round reveals
    earlier rounds, nor with "fixed", which samples cohorts of a fixed size. Epsilon is then that of the device that
    trained most often.

    Args:
        noise: z, standard deviation of the noise relative to S, above 0.
        delta: probability that epsilon does not hold; choose it below one over the number of clients.
        budget: epsilon after which no round starts; None: no limit.
        clip: S; None: adapted, from first_clip.
        quantile: quantile of the norms for an adapted clip.
        clip_rate: learning rate of the adapted clip.
        first_clip: initial S of an adapted clip.
        count_noise: standard deviation of the noise on the number of norms up to S; None: a twentieth of the cohort.
        sampling: "poisson" or "fixed".
        accountant: "pld" or "rdp" of dp-accounting, for sampling="poisson".

    Example:
        >>> gossamer.FedAvg(privacy=gossamer.CentralPrivacy(noise=1.0, clip=0.5))
        FedAvg(privacy=CentralPrivacy(noise=1.0, clip=0.5))
    """

    clip: float | None = None
    quantile: float = 0.5
    clip_rate: float = 0.2
    first_clip: float = 0.1
    count_noise: float | None = None
    sampling: str = POISSON
    accountant: str = PLD

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.clip is None or self.clip > 0,
            f"clip must be a norm above 0, or None to adapt it, got {self.clip}. Write clip=1.0.",
        )
        require(0 < self.quantile < 1, f"quantile must be between 0 and 1, got {self.quantile}. Write quantile=0.5.")
        require(self.clip_rate > 0, f"clip_rate must be above 0, got {self.clip_rate}. Write clip_rate=0.2.")
        require(self.first_clip > 0, f"first_clip must be a norm above 0, got {self.first_clip}. Write first_clip=0.1.")
        require(
            self.count_noise is None or self.count_noise > self.noise / 2,
            f"count_noise must be above half of noise, or the count alone would exceed the privacy loss of noise, got "
            f"{self.count_noise}. Write count_noise={self.noise}.",
        )
        require(self.sampling in (POISSON, FIXED), f'sampling must be "poisson" or "fixed", got {self.sampling!r}')
        require(self.accountant in (PLD, RDP), f'accountant must be "pld" or "rdp", got {self.accountant!r}')

    @property
    def on_device(self) -> bool:
        return False

    def count_noise_of(self, cohort: float) -> float:
        """Return the standard deviation of the noise on the number of norms up to the clip."""
        return max(cohort / 20, self.noise) if self.count_noise is None else self.count_noise

    def sum_noise_of(self, cohort: float) -> float:
        """Return the standard deviation of the noise on the sum, in clip norms; above z if the count is released, too.

        (z^-2 - (2 sigma_b)^-2)^(-1/2): each summand of the count is +-1/2, so a device changes it by one half.
        """
        if self.clip is not None:
            return self.noise
        return float((self.noise**-2 - (2 * self.count_noise_of(cohort)) ** -2) ** -0.5)

    def amplifies(self, cohort: int, clients: int, *, feedback: bool) -> bool:
        return self.sampling == POISSON and cohort < clients and not feedback

    def epsilon_after(
        self, rounds: int, cohort: int, clients: int, *, feedback: bool = False, entries: int = 1, bits: int = 32
    ) -> float:
        if not self.amplifies(cohort, clients, feedback=feedback):
            return gaussian_epsilon(self.noise, rounds, self.delta)
        return sampled_gaussian_epsilon(self.noise, cohort / clients, rounds, self.delta, self.accountant)


@dataclass(frozen=True, repr=False)
class LocalPrivacy(Privacy):
    """Local differential privacy: each device clips its contribution to norm S and adds noise before sending it.

    message = C(x min(1, S / |x|) + N(0, (z S)^2)), weights 1: processing a noisy number reveals nothing more
    law:    two contributions differ by at most 2 S, so the noise is z / 2 of that
    bytes:  the compressor's
    source: Kasiviswanathan et al. 2011, SIAM J. Comput.; Duchi et al. 2013, FOCS

    Each device accounts for its own privacy loss. The server needs no trust if a device pins the recipe (`gossamer
    federate join --recipe`): otherwise the server chooses it, and may choose one without noise. The mean of k devices
    has 1 / sqrt(k) of the noise of one, that of CentralPrivacy 1 / k: use LocalPrivacy for small models and many
    devices.

    Args:
        noise: z, standard deviation of the noise relative to S, above 0.
        delta: probability that epsilon does not hold.
        budget: epsilon after which a device trains no more; None: no limit.
        clip: S, the largest norm of a contribution.

    Example:
        >>> gossamer.FedAvg(privacy=gossamer.LocalPrivacy(noise=4.0, clip=1.0))
        FedAvg(privacy=LocalPrivacy(noise=4.0))
    """

    clip: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.clip > 0, f"clip must be a norm above 0, got {self.clip}. Write LocalPrivacy({self.noise}, clip=1.0)."
        )

    @property
    def spent_by_tasks(self) -> bool:
        return True  # an observer of messages also reads those that are late or rejected

    def epsilon_after(
        self, rounds: int, cohort: int, clients: int, *, feedback: bool = False, entries: int = 1, bits: int = 32
    ) -> float:
        return gaussian_epsilon(self.noise / 2, rounds, self.delta)

    def check(self, strategy: FederatedStrategy, compressor: Compressor) -> None:
        super().check(strategy, compressor)
        if remembers(strategy, compressor):
            raise RecipeError(
                f"With {strategy!r} + {compressor!r} devices keep a residual, which would be mostly noise, "
                f"sent again in each round. Write FedAvg(privacy={self!r}) + Int8(stochastic=True), or another "
                "compressor without feedback."
            )


@dataclass(frozen=True, repr=False)
class DistributedPrivacy(Privacy):
    """Distributed differential privacy: each device adds a part of the noise, in integers under SecureAggregation.

    y_i = round(x_i min(1, S / |x_i|) / unit) + noise of variance (z D)^2 / t;  D: the largest change by one device,
    including rounding; t: the least number of devices in the sum
    law:    the noise of any t devices is enough, so dropouts cost no privacy; more devices only add noise
    bytes:  SecureAggregation's
    source: Agarwal et al. 2021, NeurIPS (skellam, with a divergence bound at integer orders); Kairouz et al. 2021,
            ICML (discrete-gaussian)

    The server knows the cohort, so there is no amplification by sampling. Devices trust that t devices of the sum are
    honest.

    Args:
        noise: z, standard deviation of the noise of the sum relative to D, above 0.
        delta: probability that epsilon does not hold.
        budget: epsilon after which no round starts; None: no limit.
        clip: S, the largest norm of a contribution.
        mechanism: "skellam" or "discrete-gaussian".

    Example:
        >>> privacy = gossamer.DistributedPrivacy(noise=1.0)
        >>> gossamer.FedAvg(secure=gossamer.SecureAggregation(), privacy=privacy)
        FedAvg(secure=SecureAggregation(), privacy=DistributedPrivacy(noise=1.0))
    """

    needs_arguments: ClassVar[str] = "secure=SecureAggregation()"

    clip: float = 1.0
    mechanism: str = SKELLAM

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.clip > 0,
            f"clip must be a norm above 0, got {self.clip}. Write DistributedPrivacy({self.noise}, clip=1.0).",
        )
        require(
            self.mechanism in (SKELLAM, DISCRETE_GAUSSIAN),
            f'mechanism must be "{SKELLAM}" or "{DISCRETE_GAUSSIAN}", got {self.mechanism!r}',
        )

    @staticmethod
    def survivors(threshold: float, cohort: int) -> int:
        """Return t: the least number of a cohort in a sum; devices and accounting must use the same number."""
        return max(int(threshold * cohort), 1)

    def grid(self, entries: int, bits: int, survivors: int) -> IntegerGrid:
        """Return the rounding of contributions. entries: of all tensors of one; survivors: least number of devices in a
        sum.
        """
        return IntegerGrid(clip=self.clip, noise=self.noise, entries=entries, bits=bits, survivors=survivors)

    def epsilon_after(
        self, rounds: int, cohort: int, clients: int, *, feedback: bool = False, entries: int = 1, bits: int = 32
    ) -> float:
        """cohort: the least number of devices in a sum."""
        grid = self.grid(entries, bits, cohort)
        if rounds == 0:
            return 0.0
        orders = INTEGER_ORDERS if self.mechanism == SKELLAM else ORDERS
        distance = cohort * entries * TABLE_DISTANCE

        @cache
        def divergence(order: float) -> float:
            if self.mechanism == SKELLAM:
                return skellam_divergence(order, grid.norm, grid.norm1, grid.variance)
            return discrete_gaussian_divergence(order, grid.norm, grid.norm1, grid.variance, cohort, entries)

        def in_parts(parts: int) -> float:
            """Account for the rounds in `parts` parts, and add up their epsilons and deltas."""
            count = ceil(rounds / parts)
            by_part = renyi_epsilon(
                lambda order: count * divergence(order), self.delta / parts, orders, distance=count * distance
            )
            return parts * by_part

        # Tables cost exp(epsilon) times their distance of delta: too much above an epsilon of about 40. Rounds are then
        # accounted for in parts with a smaller epsilon.
        whole = in_parts(1)
        return whole if whole < inf else min(in_parts(2**power) for power in range(1, rounds.bit_length() + 1))

    def check(self, strategy: FederatedStrategy, compressor: Compressor) -> None:
        super().check(strategy, compressor)
        if strategy.secure is None:
            raise RecipeError(
                f"{self!r} adds a part of the noise on each device, which hides a contribution only in the sum of "
                "all. Add secure=SecureAggregation(), or write privacy=LocalPrivacy(...) for all of the noise on "
                "each device."
            )


def remembers(strategy: FederatedStrategy, compressor: Compressor, layout: Layout = SAMPLE) -> bool:
    """Whether a device's messages depend on its earlier rounds, by feedback or by the strategy's own state.

    layout: of the model; a recipe may use feedback for some of its tensors only.
    """
    like = FlatTensors.zeros(layout, dtype=torch.float32, device=torch.device("meta"))
    return bool(strategy.memory_keys) or bool(point_to_point.begin(compressor, like, AggregationContext()))
