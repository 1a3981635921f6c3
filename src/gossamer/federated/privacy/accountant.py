"""Privacy accountant: tracks the clip norm and the spent epsilon over rounds, and ends a federation with its budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import exp
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.strategies.federated_rules import (
    CentralPrivacy,
    DistributedPrivacy,
    FederatedStrategy,
    Privacy,
)
from gossamer.algorithms.strategies.federated_rules.privacy.terms import remembers
from gossamer.errors import AttachError, RecipeError, require
from gossamer.federated.model_state import ModelState
from gossamer.federated.privacy.noise_sampling import RandomBits, SystemBits, uniforms
from gossamer.federated.server.selection import SelectionPolicy, Uniform


class PoissonSelection(SelectionPolicy):
    """Poisson sampling: each present device is chosen independently with probability `rate`, so cohorts vary in size.

    The random bits are the operating system's, since sampling amplifies privacy only if no adversary can predict it.
    """

    def __init__(self, rate: float, bits: RandomBits | None = None) -> None:
        require(0 < rate <= 1, f"rate must be a probability above 0 and at most 1, got {rate}")
        self.rate = rate
        self._bits = bits or SystemBits()

    @property
    def draws_each(self) -> bool:
        return True

    def choose(self, available: Sequence[int], count: int, index: int) -> list[int]:
        """Sample from `available`; `count` is ignored."""
        coins = uniforms(self._bits, len(available))
        return [client for client, coin in zip(available, coins, strict=True) if coin <= self.rate]


def next_clip(clip: float, share_below: float, quantile: float, rate: float) -> float:
    """The next clip norm, S exp(-rate (share - quantile)).

    source: Andrew et al. 2021, NeurIPS

    Args:
        clip: the clip norm S.
        share_below: noisy fraction of norms of at most S, clamped to [0, 1].
        quantile: target fraction.
        rate: of the geometric update.
    """
    return clip * exp(-rate * (min(max(share_below, 0.0), 1.0) - quantile))


class PrivacyAccountant:
    """Accounts for the privacy loss of devices over a federation's versions.

    With amplification by sampling, every version costs every device one subsampled mechanism. Without, a version costs
    only its contributing devices (or a task costs the devices that receive it, if the server is not trusted), and
    `epsilon` is that of the device with the most.
    source: of the latter, Feldman & Zrnic 2021, NeurIPS

    Args:
        privacy: the recipe's privacy.
        cohort: expected devices per round.
        clients: devices in the federation.
        feedback: whether devices keep state, such as residuals, between rounds.
        fewest: smallest number of devices in a sum, if devices share the noise.
        blank: tensors with the shapes of a contribution, possibly on meta.
        integer_bits: of the secure sum.
        bits: random bits.

    Raises:
        ValueError: delta is too large, or the first round exceeds the budget.
    """

    def __init__(
        self,
        privacy: Privacy,
        *,
        cohort: int,
        clients: int,
        feedback: bool,
        fewest: int | None = None,
        blank: Sequence[Tensor] = (),
        integer_bits: int = 32,
        bits: RandomBits | None = None,
    ) -> None:
        require(
            privacy.delta * clients < 1,
            f"delta={privacy.delta} for {clients} clients allows the data of a whole device to leak: write "
            f"delta={0.1 / clients:.0e}",
        )
        self.privacy, self.cohort, self.clients, self.feedback = privacy, cohort, clients, feedback
        self.bits = bits or SystemBits()
        self.amplified = privacy.amplifies(cohort, clients, feedback=feedback)
        self.clip = self._first_clip()
        self.rounds = 0
        self._parts: Counter[int] = Counter()  # by device: number of its versions or tasks
        self.blank = tuple(blank)
        self._about = {"entries": max(sum(each.numel() for each in blank), 1), "bits": integer_bits}
        self._summed = fewest if fewest is not None and isinstance(privacy, DistributedPrivacy) else cohort
        self._spent: dict[int, float] = {}
        first = 0.0 if privacy.budget is None else self._epsilon(1)
        require(
            privacy.budget is None or first <= privacy.budget,
            f"the first round already costs epsilon {first:.3g}, but the budget is {privacy.budget}: write "
            "a larger noise or budget",
        )

    def _first_clip(self) -> float | None:
        if not isinstance(self.privacy, CentralPrivacy):
            return None
        return self.privacy.first_clip if self.privacy.clip is None else self.privacy.clip

    @property
    def on_server(self) -> bool:
        """Whether the server clips and adds noise."""
        return self.clip is not None

    @property
    def spent_rounds(self) -> int:
        """Largest number of rounds spent by any device."""
        return self.rounds if self.amplified else max(self._parts.values(), default=0)

    @property
    def epsilon(self) -> float:
        """Privacy loss of any one device over all versions so far, at the privacy's delta."""
        return self._epsilon(self.spent_rounds)

    @property
    def exhausted(self) -> bool:
        """Whether one more round could exceed the budget."""
        budget = self.privacy.budget
        return budget is not None and self._epsilon(self.spent_rounds + 1) > budget

    @property
    def why(self) -> str:
        """Reason why no further round begins."""
        after = self._epsilon(self.spent_rounds + 1)
        return (
            f"the privacy budget is spent: epsilon is {self.epsilon:.4g} after {self.rounds} rounds, at "
            f"delta={self.privacy.delta:g}, and one more could make it {after:.4g}, above {self.privacy.budget:g}"
        )

    def given(self, clients: Iterable[int]) -> None:
        """Tasks were given to these devices, and an untrusted server will read their contributions."""
        if self.privacy.spent_by_tasks:
            self._parts.update(list(clients))

    def committed(self, clients: Iterable[int], share_below: float | None = None) -> None:
        """A version was made of these devices' contributions. share_below: noisy fraction of norms up to the clip."""
        self.rounds += 1
        if not self.amplified and not self.privacy.spent_by_tasks:
            self._parts.update(list(clients))
        privacy = self.privacy
        if isinstance(privacy, CentralPrivacy) and privacy.clip is None and share_below is not None:
            assert self.clip is not None
            self.clip = next_clip(self.clip, share_below, privacy.quantile, privacy.clip_rate)

    def _epsilon(self, rounds: int) -> float:
        if rounds == 0:
            return 0.0
        if rounds not in self._spent:
            self._spent[rounds] = self.privacy.epsilon_after(
                rounds, self._summed, self.clients, feedback=self.feedback, **self._about
            )
        return self._spent[rounds]

    def state_dict(self) -> dict[str, Any]:
        """The spent privacy, for a restart of the server: without it the budget would be spent twice."""
        parts = torch.tensor([*self._parts.items()], dtype=torch.int64).reshape(-1, 2)
        return {"rounds": self.rounds, "clip": self.clip, "parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rounds, self.clip = int(state["rounds"]), state["clip"]
        self._parts = Counter(dict(state["parts"].tolist()))


def accountant_for(
    strategy: FederatedStrategy, compressor: Compressor, state: ModelState, clients: int
) -> PrivacyAccountant | None:
    """The accountant of a strategy with privacy, or None. Raises AttachError for a model with averaged buffers."""
    privacy, secure = strategy.privacy, strategy.secure
    if privacy is None:
        return None
    buffers = state.layout.names[state.parameters :]
    if buffers:
        raise AttachError(
            f"The model averages {buffers[0]!r} along with its parameters, and noise could make a variance "
            "negative. Use GroupNorm or LayerNorm instead of BatchNorm, or track_running_stats=False."
        )
    cohort = strategy.cohort(clients)
    fewest = None if secure is None else DistributedPrivacy.survivors(secure.threshold, cohort)
    return PrivacyAccountant(
        privacy,
        cohort=cohort,
        clients=clients,
        feedback=remembers(strategy, compressor, state.layout),
        fewest=fewest,
        blank=[torch.empty(state.layout.numel, dtype=state.dtype, device="meta")] * strategy.contribution_count,
        integer_bits=32 if secure is None else secure.bits,
    )


def private_selection(accountant: PrivacyAccountant, selection: SelectionPolicy) -> SelectionPolicy:
    """The selection that the accountant assumes. Raises RecipeError for one that depends on devices' reports."""
    rate = accountant.cohort / accountant.clients
    if isinstance(selection, PoissonSelection):
        if not accountant.on_server:
            raise RecipeError(
                f"{accountant.privacy!r} counts all contributing devices and divides by their number, but with "
                "Poisson sampling the cohort can be empty. Leave the selection out."
            )
        if selection.rate > rate:
            raise RecipeError(
                f"PoissonSelection samples at a rate of {selection.rate}, but {accountant.privacy!r} accounts for "
                f"{rate:.4g}, the strategy's fraction. Leave the selection out: the fraction's rate is used."
            )
        return selection
    if not isinstance(selection, Uniform):
        raise RecipeError(
            f"{type(selection).__name__} chooses devices by reports of their data or their speed, which have no "
            f"noise, but {accountant.privacy!r} accounts for versions only. Choose by Uniform()."
        )
    return PoissonSelection(rate, accountant.bits) if accountant.amplified else selection
