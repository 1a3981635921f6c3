"""Secure rounds: synchronous rounds whose contributions the server sees only as their sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from gossamer.core.ops import Payload
from gossamer.core.peer_ops import Push, Receipt, Reply, Stamp
from gossamer.errors import MalformedError, RecipeError
from gossamer.federated.messages import NOT_COUNTED, Fate, Report, SecureTask, encode
from gossamer.federated.secure.agreement import FEWEST_MEMBERS, KEYS, REVEAL, SHARES, Agreement
from gossamer.federated.secure.cohort import Phase, SecureCohort
from gossamer.federated.secure.fixed_point import FixedPoint
from gossamer.federated.secure.roster import Roster
from gossamer.federated.server.synchronous import SynchronousRounds


@dataclass(frozen=True)
class HeldPush:
    """A push whose receipt waits for the end of a phase, or for the fate of the round."""

    client: int
    stamp: Stamp
    key: str
    token: int


class SecureRounds(SynchronousRounds):
    """A cohort at a time, in phases: keys, shares, masked vectors, shares of who stayed or left.

    The first phase ends as a round does without masks: with keys of the cohort, which devices send once they have
    trained, or at the round's deadline. Each later one waits for those who are still there, `phase_seconds` at most.
    """

    def __init__(self, *args: Any, roster: Roster, phase_seconds: float = inf, **options: Any) -> None:
        """roster: of the devices. Raises RecipeError for a recipe without masks, or a cohort that is too small."""
        super().__init__(*args, **options)
        strategy = self.model.strategy
        if strategy.secure is None:
            raise RecipeError(f"{strategy!r} has no masks: write {type(strategy).__name__}(secure=SecureAggregation())")
        if self.cohort < FEWEST_MEMBERS:
            raise RecipeError(
                f"{strategy!r} with {self.clients} clients has cohorts of {self.cohort}, in which masks hide nobody. "
                f"Write a fraction that makes at least {FEWEST_MEMBERS}."
            )
        self._roster, self._phase_seconds = roster, phase_seconds
        self.form = FixedPoint(
            strategy.secure, self.model.compressor, self.model.state.layout, self.model.state.dtype,
            strategy.contribution_count, self.model.seed,
        )  # fmt: skip
        self.ranges = self.form.first_ranges
        self.secure: SecureCohort | None = None
        self.given_up: list[str] = []  # why rounds were
        self._held: list[HeldPush] = []
        self._unmasked = False  # its sum is in `sum`

    def assign(self, moment: float) -> list[int]:
        chosen = super().assign(moment)
        if chosen:
            task = SecureTask(members=tuple(sorted(chosen)), ranges=self.ranges)
            agreement = Agreement.of(
                self.form, task, self.next_round, self.model.version, self.model.state.fingerprint()
            )
            self.secure = SecureCohort(agreement, self._roster)
        return chosen

    def secure_task(self) -> SecureTask | None:
        if self.secure is None:
            return None
        agreement = self.secure.agreement
        return SecureTask(members=agreement.members, ranges=agreement.ranges)

    # Pushes.

    def other_push(self, client: int, push: Push, token: int) -> Receipt | None:
        if self.secure is None or push.key not in (KEYS, SHARES, REVEAL):
            return super().other_push(client, push, token)
        if push.key == KEYS:
            self.secure.take_keys(client, push.payload)
        elif push.key == SHARES:
            self.secure.take_shares(client, push.payload)
        else:
            try:
                self.secure.take_reveal(client, push.payload)
            except MalformedError as error:  # its vector is in the sum all the same
                return Receipt(version=NOT_COUNTED, about=encode(Fate(refused=str(error)[:500])))
        self._held.append(HeldPush(client, push.stamp, push.key, token))
        return None

    def take(self, client: int, stamp: Stamp, report: Report, payload: Payload) -> None:
        if self.secure is None:
            raise MalformedError(f"client {client} sent a vector, and no round under masks is open")
        self.secure.take_masked(client, payload)

    # Phases.

    def settle(self, moment: float) -> Iterator[Reply]:
        if self.assigned and self.secure is None:  # of a server that was killed: nobody knows what was masked
            self.given_up.append("the server was restarted, and with it the masked sum was lost")
            yield from self._give_up(moment)
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
        expected = cohort.waits_for() & set(self.assigned) - self._gone
        enough = cohort.phase is Phase.KEYS and cohort.heard() >= self.cohort
        return enough or not expected or moment >= self._deadline

    def _end_phase(self, moment: float) -> None:
        cohort = self.secure
        assert cohort is not None
        before = cohort.phase
        cohort.go_on()
        staying = cohort.live if before in (Phase.KEYS, Phase.SHARES) else cohort.active
        for client in [client for client in self.assigned if client not in staying]:
            self._refuse(client, f"client {client} was too slow, or left")
        self._deadline = moment + self._phase_seconds

    def _unmask(self) -> None:
        """Take the sum once all masks that are in it are known."""
        cohort = self.secure
        if cohort is None or self._unmasked or cohort.hopeless or not cohort.is_unmasked:
            return
        agreement, devices = cohort.agreement, len(cohort.active)
        try:
            total = self.form.decode(cohort.total(), agreement.ranges, devices, agreement.index)
        except MalformedError as error:
            cohort.hopeless = str(error)
            return
        self.sum.add_total(total.sums, total.weight, total.steps, devices)
        self.ranges = self.form.ranges_after(agreement.ranges, total, devices)
        self._unmasked = True

    def is_complete(self, moment: float) -> bool:
        return self._unmasked

    def is_hopeless(self, moment: float) -> bool:
        return self.secure is not None and bool(self.secure.hopeless)

    def open_anew(self, moment: float) -> None:
        if self.secure is not None and self.secure.hopeless:
            self.given_up.append(self.secure.hopeless)
        self.secure, self._unmasked = None, False
        super().open_anew(moment)

    def _answer_held(self) -> Iterator[Reply]:
        held, self._held = self._held, []
        for each in held:
            answer = self._phase_answer(each)
            if answer is None:
                self._held.append(each)
            else:
                yield Reply(token=each.token, answer=answer)
        if self.secure is not None and self.secure.phase is Phase.REVEAL and not self.secure.hopeless:
            for client, reported in self.reported.items():
                tokens, reported.tokens = reported.tokens, []
                for token in tokens:
                    yield Reply(token=token, answer=self.secure.survivors_around(client))

    def _phase_answer(self, held: HeldPush) -> Receipt | None:
        """None: it waits on."""
        assignment = self.assigned.get(held.client)
        if self.secure is None or assignment is None or assignment.round != held.stamp.step:
            return self._answered_before(held.client, held.stamp)
        phase = self.secure.phase
        if self.secure.hopeless:
            return None
        if held.key == KEYS and phase is not Phase.KEYS:
            return self.secure.keys_around(held.client)
        if held.key == SHARES and phase in (Phase.MASKED, Phase.REVEAL):
            return self.secure.shares_for(held.client)
        return None
