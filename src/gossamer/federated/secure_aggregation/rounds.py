"""Secure rounds: synchronous rounds in which the server learns only the sum of the contributions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Push, Receipt, Reply, Stamp
from gossamer.errors import MalformedError, RecipeError
from gossamer.events import notice
from gossamer.federated.messages import Report, SecureTask
from gossamer.federated.secure_aggregation.agreement import (
    CONSENT,
    FEWEST_MEMBERS,
    KEYS,
    REVEAL,
    SHARES,
    Agreement,
    shares_needed,
)
from gossamer.federated.secure_aggregation.cohort import Phase, SecureCohort
from gossamer.federated.secure_aggregation.fixed_point import (
    WEIGHT_LEVELS,
    CohortTotal,
    PrivateFixedPoint,
    fixed_point_of,
)
from gossamer.federated.secure_aggregation.identities import IdentityRoster
from gossamer.federated.server.roster import Assignment
from gossamer.federated.server.rounds import Reported
from gossamer.federated.server.synchronous import SynchronousRounds

PHASE_KEYS = (KEYS, SHARES, CONSENT, REVEAL)


@dataclass(frozen=True)
class HeldPush:
    """A push with a receipt that waits for the end of a phase or of the round."""

    client: int
    stamp: Stamp
    key: str
    token: int


class SecureRounds(SynchronousRounds):
    """One cohort at a time, in phases: keys, shares, masked vectors, signatures of the list of vectors, shares.

    The first phase ends as a round without masks does: with the keys of the cohort, which devices send after training,
    or at the round's deadline. Each later phase waits for the remaining devices, at most `phase_seconds`.

    Args:
        roster: identities of the devices.
        phase_seconds: longest duration of each later phase.
        fewest: smallest number of devices per version.

    Raises:
        RecipeError: the recipe has no masks, the cohort is too small, or an option needs individual reports.
    """

    def __init__(
        self, *args: Any, roster: IdentityRoster, phase_seconds: float = inf, fewest: int = 1, **options: Any
    ) -> None:
        super().__init__(*args, fewest=fewest, **options)
        strategy = self.model.strategy
        if strategy.secure is None:
            raise RecipeError(f"{strategy!r} has no masks: write {type(strategy).__name__}(secure=SecureAggregation())")
        if self.cohort < FEWEST_MEMBERS:
            raise RecipeError(
                f"{strategy!r} with {self.clients} clients has cohorts of {self.cohort}, too small for masks to hide a "
                f"device. Write a fraction that makes at least {FEWEST_MEMBERS}."
            )
        needed = shares_needed(strategy.secure.threshold, self._most)
        if needed > self.cohort:
            raise RecipeError(
                f"over_selection={self._over_selection:g} chooses {self._most} devices and continues with "
                f"{self.cohort}, but under {strategy.secure!r} {needed} of them must stay: choose fewer beyond the "
                "cohort."
            )
        if self._late_versions:
            raise RecipeError('late="count" adds single reports, but masks allow only sums. Write late="drop".')
        if self.selection.reads_metrics:
            raise RecipeError(
                f"{type(self.selection).__name__} chooses by the losses that devices report, but under "
                f"{strategy.secure!r} they report none. Leave the selection out, or write LeastTrained()."
            )
        self._fewest = self.attempts.fewest = max(fewest, FEWEST_MEMBERS)
        self.identities, self._phase_seconds = roster, phase_seconds
        self.form = fixed_point_of(strategy, self.model.compressor, self.model.state, self.model.seed)
        self.ranges = self.form.first_ranges
        self.secure: SecureCohort | None = None
        self.given_up: list[str] = []  # reasons
        self._held: list[HeldPush] = []
        self._unmasked = False  # whether `sum` has the unmasked sum
        self._noted_cut = False

    def assign(self, moment: float) -> list[int]:
        chosen = super().assign(moment)
        if chosen:
            self.secure_task = task = SecureTask(members=tuple(sorted(chosen)), ranges=self.ranges)
            layout = self.model.state.fingerprint
            agreement = Agreement.of(self.form, task, self.roster.next_round, self.model.version, layout)
            fewest = agreement.survivors if isinstance(self.form, PrivateFixedPoint) else 0
            self.secure = SecureCohort(agreement, self.identities, fewest)
        return chosen

    # Pushes.

    def other_push(self, client: int, push: Push, token: int) -> Receipt | None:
        cohort = self.secure
        if cohort is None or push.key not in PHASE_KEYS:
            return super().other_push(client, push, token)
        take = {
            KEYS: cohort.take_keys, SHARES: cohort.take_shares,
            CONSENT: cohort.take_consent, REVEAL: cohort.take_reveal,
        }[push.key]  # fmt: skip
        take(client, push.payload)
        self._held.append(HeldPush(client, push.stamp, push.key, token))
        return None

    def _repeated(self, reported: Reported, push: Push, token: int) -> Receipt | None:
        if push.key in PHASE_KEYS and push.stamp == reported.stamp:
            return self.other_push(push.stamp.worker, push, token)
        return super()._repeated(reported, push, token)

    def most_bytes(self, assignment: Assignment) -> int:
        cohort = self.secure
        vector = 0 if cohort is None else cohort.agreement.ring.wire_bytes(cohort.agreement.count)
        return self.admission.most_bytes(vector)

    def take(self, client: int, stamp: Stamp, report: Report, payload: Payload) -> None:
        if self.secure is None:
            raise MalformedError("it sent a vector, but no round under masks is open")
        self.secure.take_masked(client, payload)

    # Phases.

    def settle(self, moment: float) -> Iterator[Reply]:
        if moment >= self.roster.unheard_until:
            self.roster.count_missing()
        if self._is_open and self.secure is None and not self.finished:  # a restart loses the masked sum
            yield from self._give_up(moment, "the server was restarted, and the masked sum of its cohort is lost")
        while self._phase_is_over(moment):
            self._end_phase(moment)
        self._unmask()
        yield from self._answer_held()
        yield from super().settle(moment)
        yield from self._answer_held()

    def _phase_is_over(self, moment: float) -> bool:
        cohort = self.secure
        if cohort is None or cohort.hopeless or cohort.is_unmasked:
            return False
        expected = cohort.waits_for() & set(self.roster.assigned) - self.roster.away
        enough = cohort.phase is Phase.KEYS and cohort.count_received() >= max(self.cohort, cohort.fewest)
        return enough or not expected or moment >= self.deadline

    def _end_phase(self, moment: float) -> None:
        cohort = self.secure
        assert cohort is not None
        before = cohort.phase
        cohort.go_on()
        staying = cohort.live if before in (Phase.KEYS, Phase.SHARES) else cohort.active
        late = [client for client in self.roster.assigned if client not in staying]
        for client in late:
            self.selection.missed(client, moment - self.roster.assigned[client].moment)
        if late:
            self._drop(late)
        self.deadline = moment + self._phase_seconds

    def _unmask(self) -> None:
        """Add the sum once all its masks are known."""
        cohort = self.secure
        if cohort is None or self._unmasked or cohort.hopeless or not cohort.is_unmasked:
            return
        agreement, devices = cohort.agreement, len(cohort.active)
        try:
            total = self.form.decode(
                cohort.total(), agreement.ranges, devices, agreement.index, survivors=agreement.survivors
            )
        except MalformedError as error:
            cohort.hopeless = str(error)
            return
        self.sum.add_total(total.sums, total.weight, total.steps, devices)
        self.ranges = self.form.ranges_after(agreement.ranges, total, devices)
        self._note_cut(agreement.ranges, total, devices)
        self.refused |= cohort.liars
        self._unmasked = True

    def _note_cut(self, ranges: Sequence[float], total: CohortTotal, devices: int) -> None:
        """Give notice, once, of devices with a clipped weight if the range of weights does not grow."""
        cut, heaviest = total.heavy[0], ranges[-1]
        if cut and self.ranges[-1] <= heaviest and not self._noted_cut:
            self._noted_cut = True
            notice(
                f"Round {self.roster.next_round}: {cut} of {devices} devices have a weight above {heaviest:g} and "
                f"count with {heaviest:g}. Under masks a device counts at most {WEIGHT_LEVELS[-1]} times as much as a "
                "quarter of the devices. If these devices do have so much data, use FedAvg without secure=; otherwise "
                "correct the samples= that they return."
            )

    def is_complete(self, moment: float) -> bool:
        return self._unmasked

    def is_hopeless(self, moment: float) -> bool:
        return self.secure is not None and bool(self.secure.hopeless)

    def _give_up(self, moment: float, why: str) -> Iterator[Reply]:
        found = self.secure.hopeless if self.secure is not None and self.secure.hopeless else why
        self.given_up.append(found)
        yield from super()._give_up(moment, found)

    def reopen(self, moment: float) -> None:
        self.secure, self.secure_task, self._unmasked = None, None, False
        super().reopen(moment)

    def _answer_held(self) -> Iterator[Reply]:
        held, self._held = self._held, []
        for each in held:
            answer = self._phase_answer(each)
            if answer is None:
                self._held.append(each)
            else:
                yield Reply(token=each.token, answer=answer)
        if self.secure is not None and self.secure.phase in (Phase.CONSENT, Phase.REVEAL) and not self.secure.hopeless:
            for reported in self.reported.values():
                tokens, reported.tokens = reported.tokens, []
                for token in tokens:
                    yield Reply(token=token, answer=self.secure.survivors_receipt())

    def _phase_answer(self, held: HeldPush) -> Receipt | None:
        """The receipt of a held push; None: it waits."""
        assignment = self.roster.assigned.get(held.client)
        if self.secure is None or assignment is None or assignment.round != held.stamp.step:
            return self._answered_before(held.client, held.stamp)
        phase = self.secure.phase
        if self.secure.hopeless:
            return None
        if held.key == KEYS and phase is not Phase.KEYS:
            return self.secure.keys_around(held.client)
        if held.key == SHARES and phase not in (Phase.KEYS, Phase.SHARES):
            return self.secure.shares_for(held.client)
        if held.key == CONSENT and phase is Phase.REVEAL:
            return self.secure.consents()
        return None

    # State in the journal.

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"ranges": list(self.ranges)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        ranges = tuple(map(float, state["ranges"]))
        if len(ranges) == len(self.ranges):  # journals of older versions have no range of weights
            self.ranges = ranges
