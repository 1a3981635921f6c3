"""Privacy: how much of any one device can be learned from a federation, and how clipping and noise bound that.

The unit is a device with all that it has: federations with and without its data are told apart with odds of at most
exp(epsilon), but for a chance of delta. Metrics, numbers of samples and times that devices report are not protected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from math import ceil, inf
from typing import TYPE_CHECKING, ClassVar

import torch

from gossamer.algorithms.compressors import Compressor, point_to_point
from gossamer.algorithms.strategies.federated.privacy.epsilon import (
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
from gossamer.algorithms.strategies.federated.privacy.integer_grid import IntegerGrid
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.term import Term
from gossamer.errors import RecipeError, require

if TYPE_CHECKING:
    from gossamer.algorithms.strategies.federated.base import FederatedStrategy

POISSON, FIXED = "poisson", "fixed"  # ways to draw a cohort
SKELLAM, DISCRETE_GAUSSIAN = "skellam", "discrete-gaussian"
SAMPLE = Layout.of({"weight": (1024, 1024), "bias": (1024,), "scale": (1,)})  # of every kind that a recipe routes
TABLE_DISTANCE = 1e-30  # total variation between an integer that is drawn by a table and its distribution


@dataclass(frozen=True, repr=False)
class Privacy(Term, ABC):
    """User-level differential privacy: contributions are clipped, all their tensors together, and noise is added."""

    kind = "privacy"

    noise: float  # standard deviation, in units of the most that one device can change
    delta: float = 1e-5  # the chance that epsilon does not hold; below one over the number of clients
    budget: float | None = None  # epsilon after which no round begins; None: the federation goes on

    def __post_init__(self) -> None:
        name = type(self).__name__
        require(self.noise > 0, f"noise is above 0, not {self.noise}: write {name}(noise=1.0)")
        require(0 < self.delta < 1, f"delta is a chance between 0 and 1, not {self.delta}: write {name}(delta=1e-5)")
        require(
            self.budget is None or self.budget > 0,
            f"budget is an epsilon above 0, not {self.budget}: write {name}(noise={self.noise}, budget=4.0)",
        )

    @property
    def on_device(self) -> bool:
        """Whether devices clip and add noise themselves, and the server is told nothing else."""
        return True

    @property
    def spent_by_tasks(self) -> bool:
        """Whether every task that a device is given may tell of it, also one of which no version is made."""
        return False

    def amplifies(self, cohort: int, clients: int, *, feedback: bool) -> bool:
        """Whether it counts that a device takes part in some rounds only, and nobody sees in which.

        feedback: whether devices remember what they sent, so that a round carries those before it.
        """
        return False

    @abstractmethod
    def epsilon_after(
        self, rounds: int, cohort: int, clients: int, *, feedback: bool = False, entries: int = 1, bits: int = 32
    ) -> float:
        """Epsilon, at `delta`, after so many rounds of `cohort` of `clients` devices.

        Where sampling does not count, of a device that took part in all of them; rounds may then be how many it took
        part in. entries, bits: of a contribution, where integers are summed.
        """

    def check(self, strategy: FederatedStrategy, compressor: Compressor) -> None:
        """Raises RecipeError for a strategy under which one device could change more than is accounted for."""
        if not strategy.aggregator.is_linear:
            raise RecipeError(
                f"{strategy.aggregator!r} chooses among contributions, and one device may change which are chosen: by "
                f"more than the clip norm over the cohort, for which {self!r} adds noise. Leave aggregator= out: "
                "clipping bounds what an outlier can do."
            )
        if strategy.asynchronous:
            raise RecipeError(
                f"{strategy!r} takes contributions as they come, perhaps several of one fast device for one version, "
                f"and {self!r} adds noise for one of each. Write FedAvg(privacy={self!r})."
            )
        if strategy.needs_steps:
            raise RecipeError(
                f"{type(strategy).__name__} scales its step by how many steps devices report, which no noise hides. "
                f"Write FedAvg(privacy={self!r})."
            )
        secure = strategy.secure is not None
        if secure and not isinstance(self, DistributedPrivacy):
            raise RecipeError(
                "Under SecureAggregation the server sees no contribution, so it cannot clip one, and noise has to be "
                f"made of integers. Write privacy=DistributedPrivacy(noise={self.noise}, clip=1.0)."
            )


@dataclass(frozen=True, repr=False)
class CentralPrivacy(Privacy):
    """The server clips each contribution to norm S, and adds Gaussian noise to their sum; devices trust the server.

    mean = (sum_i x_i min(1, S / |x_i|) + N(0, (z S)^2)) / (q W), for W devices that each take part with probability q
    law:    every device has weight 1, and one of W changes the sum by at most S; q W is what is expected, not who came
    clip:   None adapts S to the quantile of the norms: S <- S exp(-rate (b - quantile)), b: the share of norms up to S
            with noise of its own; the noise of the sum grows so that both together cost what z alone would
    bytes:  none
    source: McMahan et al. 2018, ICLR; clip=None: Andrew et al. 2021, NeurIPS

    The clip is the last that is done before noise, on what the message stands for once it is decoded. What is clipped
    away is gone: feedback owes what compression lost and no more, or one round's data would be said in many.
    With sampling "poisson" each device is drawn by a coin, which makes epsilon smaller as nobody sees the coins. That
    is neither done nor claimed where devices remember (feedback, SCAFFOLD), so that a round tells of rounds before it;
    nor with "fixed", which draws exactly the cohort. Then epsilon is that of the device that took part most.
    """

    clip: float | None = None  # S; None: adapted, from first_clip
    quantile: float = 0.5  # of the norms, that an adapted clip goes to
    clip_rate: float = 0.2  # how fast
    first_clip: float = 0.1
    count_noise: float | None = None  # standard deviation of the count's noise; None: a twentieth of the cohort
    sampling: str = POISSON
    accountant: str = PLD  # of dp-accounting, for sampling="poisson"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.clip is None or self.clip > 0,
            f"clip is a norm above 0, or None to adapt it, not {self.clip}: write clip=1.0",
        )
        require(0 < self.quantile < 1, f"quantile is between 0 and 1, not {self.quantile}: 0.5 is the median")
        require(self.clip_rate > 0, f"clip_rate is above 0, not {self.clip_rate}: write clip_rate=0.2")
        require(self.first_clip > 0, f"first_clip is a norm above 0, not {self.first_clip}: write first_clip=0.1")
        require(
            self.count_noise is None or self.count_noise > self.noise / 2,
            f"count_noise is above half of noise, or the count alone would cost more than all may, not "
            f"{self.count_noise}: write count_noise={self.noise}",
        )
        require(self.sampling in (POISSON, FIXED), f'sampling is "poisson" or "fixed", not {self.sampling!r}')
        require(self.accountant in (PLD, RDP), f'accountant is "pld" or "rdp", not {self.accountant!r}')

    @property
    def on_device(self) -> bool:
        return False

    def count_noise_of(self, cohort: float) -> float:
        """Standard deviation of the noise on how many norms were below the clip."""
        return max(cohort / 20, self.noise) if self.count_noise is None else self.count_noise

    def sum_noise_of(self, cohort: float) -> float:
        """Standard deviation of the noise on the sum, in clip norms: more than z where the count tells something, too.

        (z^-2 - (2 sigma_b)^-2)^(-1/2): a count of halves, of which a device changes one half.
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
    """Each device clips its contribution to norm S and adds noise before it sends it, and counts what it told itself.

    message = C(x min(1, S / |x|) + N(0, (z S)^2)), weights 1: what is made of a noisy number tells no more than it
    law:    two contributions differ by at most 2 S, so the noise is z / 2 of that
    bytes:  the compressor's
    source: Kasiviswanathan et al. 2011, SIAM J. Comput.; Duchi et al. 2013, FOCS

    The server needs no trust once a device has pinned the recipe (`gossamer federate join --recipe`): else the server
    names it, and may name one without noise. The mean of k devices has 1 / sqrt(k) of the noise of one, where
    CentralPrivacy has 1 / k: use it for small models and many devices.
    """

    clip: float = 1.0  # S

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.clip > 0, f"clip is a norm above 0, not {self.clip}: write LocalPrivacy({self.noise}, clip=1.0)")

    @property
    def spent_by_tasks(self) -> bool:
        return True  # who reads the messages has read those, too, that came late or were refused

    def epsilon_after(
        self, rounds: int, cohort: int, clients: int, *, feedback: bool = False, entries: int = 1, bits: int = 32
    ) -> float:
        return gaussian_epsilon(self.noise / 2, rounds, self.delta)

    def check(self, strategy: FederatedStrategy, compressor: Compressor) -> None:
        super().check(strategy, compressor)
        if remembers(strategy, compressor):
            raise RecipeError(
                f"With {strategy!r} + {compressor!r} devices remember what was not sent, which would be mostly noise, "
                f"sent again round after round. Write FedAvg(privacy={self!r}) + Int8(stochastic=True), or another "
                "compressor without feedback."
            )


@dataclass(frozen=True, repr=False)
class DistributedPrivacy(Privacy):
    """Each device adds a share of the noise, in integers under SecureAggregation; the sum has all of it.

    y_i = round(x_i min(1, S / |x_i|) / unit) + noise of variance (z D)^2 / t;  D: what a device can change, rounding
    included; t: how many devices the sum has at least
    law:    the noise of any t devices is enough, so drops cost nothing; more devices only add to it
    bytes:  SecureAggregation's
    source: Agarwal et al. 2021, NeurIPS (skellam, whose divergence is bounded at whole orders); Kairouz et al. 2021,
            ICML (discrete-gaussian)

    The server knows who takes part, so sampling makes nothing smaller; and devices trust that t are honest.
    """

    beside: ClassVar[str] = "secure=SecureAggregation()"

    clip: float = 1.0  # S
    mechanism: str = SKELLAM

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.clip > 0, f"clip is a norm above 0, not {self.clip}: write DistributedPrivacy({self.noise}, clip=1.0)"
        )
        require(
            self.mechanism in (SKELLAM, DISCRETE_GAUSSIAN),
            f'mechanism is "{SKELLAM}" or "{DISCRETE_GAUSSIAN}", not {self.mechanism!r}',
        )

    @staticmethod
    def survivors(threshold: float, cohort: int) -> int:
        """t: of a cohort, of which a sum has this share or is given up; devices and accounting must have it alike."""
        return max(int(threshold * cohort), 1)

    def grid(self, entries: int, bits: int, survivors: int) -> IntegerGrid:
        """How contributions are rounded. entries: of all tensors of one; survivors: devices in every sum, or more."""
        return IntegerGrid(clip=self.clip, noise=self.noise, entries=entries, bits=bits, survivors=survivors)

    def epsilon_after(
        self, rounds: int, cohort: int, clients: int, *, feedback: bool = False, entries: int = 1, bits: int = 32
    ) -> float:
        """cohort: as few as the sum may have."""
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
            """Rounds in so many parts, whose epsilons and deltas add up."""
            count = ceil(rounds / parts)
            by_part = renyi_epsilon(
                lambda order: count * divergence(order), self.delta / parts, orders, distance=count * distance
            )
            return parts * by_part

        # Tables cost exp(epsilon) times their distance of delta: too much from an epsilon of about 40 on, for which
        # rounds are accounted for in parts below that.
        whole = in_parts(1)
        return whole if whole < inf else min(in_parts(2**power) for power in range(1, rounds.bit_length() + 1))

    def check(self, strategy: FederatedStrategy, compressor: Compressor) -> None:
        super().check(strategy, compressor)
        if strategy.secure is None:
            raise RecipeError(
                f"{self!r} gives each device a share of the noise, which hides one contribution only in the sum of "
                "all. Add secure=SecureAggregation(), or write privacy=LocalPrivacy(...) for all of the noise on "
                "each device."
            )


def remembers(strategy: FederatedStrategy, compressor: Compressor, layout: Layout = SAMPLE) -> bool:
    """Whether what a device sends depends on its rounds before: by feedback, or by the strategy's own memory.

    layout: of the model; a recipe may keep feedback for some of its tensors only.
    """
    like = FlatTensors.zeros(layout, dtype=torch.float32, device=torch.device("meta"))
    return bool(strategy.memory_keys) or bool(point_to_point.begin(compressor, like, AggregationContext()))
