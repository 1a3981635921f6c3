"""Invitations: the text of a link, and which machines a coordinator admits by it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.fault_seeds import block_name, blocks, replayed

from gossamer.base.peer_ops import Peer, Pull, Push, Receipt, Stamp
from gossamer.comm import libcrypto
from gossamer.comm.membership.invitations import (
    INVITE,
    LOOK,
    PREFIX,
    REDEEM,
    REVOKE,
    InvitationBook,
    JoinLink,
    Welcome,
    guest_of,
    invitation_secret,
    read_answer,
    read_invitation,
    read_issued,
    read_redeemed,
)
from gossamer.comm.membership.journal import MemoryJournal, ViewJournal, ViewLog
from gossamer.comm.membership.messages import COORDINATOR
from gossamer.errors import ConnectError, MalformedError

TOKEN, RUN = bytes(range(32)), "0123456789abcdef" * 2
CONTENT = bytes(reversed(range(200)))  # of a token file
ADDRESSES = (("10.0.0.1", 29700), ("office.example.org", 443), ("2001:db8::1", 29700))
INVITATION = JoinLink(number=7, run=RUN[:16], secret=bytes(32), addresses=ADDRESSES)
NONCE = "ab" * 16


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def book_of(journal: ViewJournal, clock: Clock, token: bytes = TOKEN, run: str = RUN) -> InvitationBook:
    welcome = Welcome(token=CONTENT, addresses=ADDRESSES, settings={"recipe": "Int8()"})
    return InvitationBook(token, run, journal, welcome, clock)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> InvitationBook:
    return book_of(MemoryJournal(), clock)


def redeemed(book: InvitationBook, invitation: JoinLink, machine: int) -> bytes:
    """The token that a machine receives. Raises ConnectError if it is refused."""
    push = Push(to=COORDINATOR, key=REDEEM, stamp=Stamp(machine, 0), about=NONCE)
    answer = book.answer_guest(guest_of(invitation.number), push, (), "")
    return read_redeemed(invitation, NONCE, answer.about).token


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_link_is_one_word_that_is_read_back(encrypted: bool) -> None:
    invitation = replace(INVITATION, encrypted=encrypted)
    link = invitation.link()
    assert link.startswith(PREFIX)
    assert not set(link) - set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_:")
    assert read_invitation(link) == invitation
    assert read_invitation(f"  {link[:50]}\n  {link[50:]}\n") == invitation  # wrapped by a mail program


def test_every_mistyped_character_of_a_link_is_detected() -> None:
    link = INVITATION.link()
    for place in range(len(link)):
        for wrong in {"A", "b", "-", " "} - {link[place]}:
            with pytest.raises(ConnectError, match=r"Copy the whole link|format"):
                read_invitation(link[:place] + wrong + link[place + 1 :])
    for size in range(len(link)):
        with pytest.raises(ConnectError, match="Copy the whole link"):
            read_invitation(link[:size])


def test_a_link_of_a_later_format_asks_for_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.comm.membership.invitations.VERSION", 2)
    link = INVITATION.link()
    monkeypatch.undo()
    with pytest.raises(ConnectError, match="Install the version"):
        read_invitation(link)


def test_neither_repr_nor_link_shows_the_token_of_the_run(book: InvitationBook) -> None:
    made = book.create(None, None)
    assert made.secret != TOKEN
    assert made.secret.hex() not in repr(made)
    assert str(made.secret) not in repr(made)
    assert str(CONTENT) not in repr(Welcome(token=CONTENT, addresses=()))


def test_a_machine_receives_the_token_and_the_settings_of_the_run(book: InvitationBook) -> None:
    made = book.create(None, None)
    push = Push(to=COORDINATOR, key=REDEEM, stamp=Stamp(5, 0), about=NONCE)
    answer = book.answer_guest(guest_of(made.number), push, (), "")
    found = read_redeemed(made, NONCE, answer.about)
    assert (found.token, found.settings) == (CONTENT, {"recipe": "Int8()"})
    assert CONTENT.hex() not in answer.about  # an eavesdropper receives the answer, too
    with pytest.raises(MalformedError, match="another key"):
        read_redeemed(replace(made, secret=bytes(32)), NONCE, answer.about)
    with pytest.raises(MalformedError, match="another key"):  # an answer to another request
        read_redeemed(made, NONCE[::-1], answer.about)


def test_two_answers_to_one_request_have_different_ciphertexts(book: InvitationBook) -> None:
    """Otherwise the XOR of two answers with different contents would reveal both."""
    made = book.create(None, None)
    push = Push(to=COORDINATOR, key=REDEEM, stamp=Stamp(5, 0), about=NONCE)
    sealed = [json.loads(book.answer_guest(guest_of(1), push, (), "").about)["sealed"] for _ in range(2)]
    assert sealed[0] != sealed[1]
    assert redeemed(book, made, 5) == CONTENT


def test_an_answer_of_an_older_version_is_refused_with_a_remedy(book: InvitationBook) -> None:
    older = json.dumps({"nonce": "00" * 16, "token": "00" * 32, "settings": {}})
    with pytest.raises(ConnectError, match=r"older version.*Install"):
        read_redeemed(book.create(None, None), NONCE, older)


def test_a_coordinator_without_libcrypto_refuses_and_counts_no_use(
    book: InvitationBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(*_: bytes) -> bytes:
        raise ConnectError("this Python's OpenSSL is hidden")

    made = book.create(None, 1)
    with monkeypatch.context() as patch:
        patch.setattr(libcrypto, "seal", hidden)
        with pytest.raises(ConnectError, match=r"coordinator.*hidden"):
            redeemed(book, made, 1)
    assert redeemed(book, made, 2) == CONTENT


def test_an_expired_link_is_refused(book: InvitationBook, clock: Clock) -> None:
    made = book.create(3600.0, None)
    clock.now += 3599.0
    assert redeemed(book, made, 1) == CONTENT
    clock.now += 1.0
    with pytest.raises(ConnectError, match=r"expired .* ago.*gossamer invite"):
        redeemed(book, made, 2)


def test_a_link_for_two_machines_admits_two_and_counts_a_repeated_request_once(book: InvitationBook) -> None:
    made = book.create(None, 2)
    for machine in (1, 2, 1, 2):
        assert redeemed(book, made, machine) == CONTENT
    with pytest.raises(ConnectError, match=r"used 2 of 2 times.*gossamer invite"):
        redeemed(book, made, 3)


def test_a_revoked_link_is_refused_and_others_are_not(book: InvitationBook) -> None:
    first, second = book.create(None, None), book.create(None, None)
    book.revoke(first.number)
    with pytest.raises(ConnectError, match="revoked"):
        redeemed(book, first, 1)
    assert redeemed(book, second, 1) == CONTENT
    with pytest.raises(ConnectError, match="no invitation 9"):
        book.revoke(9)


@pytest.mark.parametrize(("lifetime", "uses"), [(0.0, None), (-1.0, None), (float("nan"), None), (1e400, 1), (None, 0)])
def test_limits_that_admit_no_machine_are_rejected(book: InvitationBook, lifetime: float | None, uses: int) -> None:
    with pytest.raises(ConnectError, match="Write"):
        book.create(lifetime, uses)


def test_a_look_names_the_members_to_valid_guests_only(book: InvitationBook) -> None:
    made = book.create(None, 1)
    look = Pull(of=COORDINATOR, key=LOOK)
    answer = book.answer_guest(guest_of(made.number), look, ((("10.0.0.5", 4),),), "2 workers", ("203.0.113.7", 5))
    found = read_answer(answer.about)
    assert found == {
        "members": [[["10.0.0.5", 4]]],
        "status": "2 workers",
        "seen_as": ["203.0.113.7", 5],
        "relays": False,
        "other_relays": [],
    }
    redeemed(book, made, 1)
    with pytest.raises(ConnectError, match="used 1 of 1"):
        read_answer(book.answer_guest(guest_of(made.number), look, ((("10.0.0.5", 4),),), "").about)


@pytest.mark.parametrize("key", ["resize", "here", INVITE, REVOKE, "telemetry", "leaves"])
def test_a_guest_can_make_no_other_request(book: InvitationBook, key: str) -> None:
    made = book.create(None, None)
    push = Push(to=COORDINATOR, key=key, stamp=Stamp(1, 1))
    answer = book.answer_guest(guest_of(made.number), push, (), "")
    with pytest.raises(ConnectError, match="a guest cannot"):
        read_answer(answer.about)


def test_the_key_of_a_guest_is_that_of_its_invitation(book: InvitationBook) -> None:
    first, second = book.create(None, None), book.create(None, None)
    assert book.secret(guest_of(first.number)) == first.secret != second.secret
    assert book.secret(guest_of(3)) is None
    assert book.secret(Peer("guest", -1)) is None
    assert "no invitation 3" in book.refusal(3, 0)


def test_links_of_two_runs_with_one_token_differ(clock: Clock) -> None:
    secrets = {book_of(MemoryJournal(), clock, run=run).create(None, None).secret for run in (RUN, RUN[::-1])}
    assert len(secrets) == 2


def test_a_member_makes_and_revokes_invitations_without_a_secret_on_the_wire(book: InvitationBook) -> None:
    limits = json.dumps({"lifetime_seconds": 60, "uses": 1})
    answer = book.answer_member(Push(to=COORDINATOR, key=INVITE, stamp=Stamp(0, 0), about=limits))
    made = read_issued(TOKEN, answer.about)
    assert made.secret == invitation_secret(TOKEN, RUN, 1)
    assert made.secret.hex() not in answer.about
    assert redeemed(book, made, 1) == CONTENT
    assert book.answer_member(Push(to=COORDINATOR, key=REVOKE, stamp=Stamp(0, 1))).version == 0
    assert "revoked" in book.refusal(1, 1)


@pytest.mark.parametrize(
    "about", ["", "[]", "{", '{"uses": "1"}', '{"uses": true}', '{"lifetime_seconds": NaN}', '{"uses": 0}',
              '{"lifetime_seconds": 1' + 400 * "0" + "}"],
)  # fmt: skip
def test_invalid_limits_from_a_member_are_refused(book: InvitationBook, about: str) -> None:
    answer = book.answer_member(Push(to=COORDINATOR, key=INVITE, stamp=Stamp(0, 0), about=about))
    assert isinstance(answer, Receipt)
    assert answer.version == -1


def test_a_restarted_coordinator_knows_the_links_and_their_uses(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "journal"
    log = ViewLog(path, print)
    before = book_of(log, clock)
    made, revoked = before.create(100.0, 1), before.create(None, None)
    redeemed(before, made, 1)
    before.revoke(revoked.number)
    log.close()
    assert made.secret.hex() not in path.read_text()
    log = ViewLog(path, print)
    after = book_of(log, clock)
    assert redeemed(after, made, 1) == CONTENT
    for invitation, machine, why in ((made, 2, "used 1 of 1"), (revoked, 2, "revoked")):
        with pytest.raises(ConnectError, match=why):
            redeemed(after, invitation, machine)
    clock.now += 100.0
    with pytest.raises(ConnectError, match="expired"):
        redeemed(after, made, 1)
    log.close()


def test_uses_of_a_link_without_a_limit_are_not_written_to_the_journal(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "journal"
    log = ViewLog(path, print)
    book = book_of(log, clock)
    made = book.create(None, None)
    before = path.stat().st_size
    for machine in range(50):
        assert redeemed(book, made, machine) == CONTENT
    log.close()
    assert path.stat().st_size == before


def admitted_as_allowed(seed: int, make: Callable[[ViewJournal, Clock], InvitationBook]) -> None:
    """Random machines, repetitions, revocations, restarts and times; a model of three numbers decides."""
    rng, clock, journal = random.Random(seed), Clock(), MemoryJournal()
    book = make(journal, clock)
    limits = [(rng.choice([None, 5.0, 20.0]), rng.choice([None, 1, 2])) for _ in range(3)]
    made = [book.create(*each) for each in limits]
    begun, used, revoked = clock.now, [set[int]() for _ in made], set[int]()
    for _ in range(40):
        match rng.randrange(6):
            case 0:
                clock.now += rng.expovariate(0.5)
            case 1 if rng.random() < 0.2:
                revoked.add(number := rng.randrange(3))
                book.revoke(made[number].number)
            case 2 if rng.random() < 0.3:
                book = make(journal, clock)
            case _:
                number, machine = rng.randrange(3), rng.randrange(4)
                lifetime, uses = limits[number]
                allowed = number not in revoked and (lifetime is None or clock.now < begun + lifetime)
                allowed &= uses is None or machine in used[number] or len(used[number]) < uses
                try:
                    token = redeemed(book, made[number], machine)
                except ConnectError:
                    token = None
                assert (token == CONTENT) is allowed, (seed, number, machine)
                if allowed:
                    used[number].add(machine)


@pytest.mark.parametrize("block", blocks(50), ids=block_name)
def test_machines_are_admitted_exactly_while_a_link_allows_it(block: range) -> None:
    for seed in block:
        with replayed(seed, "admitted_exactly"):
            admitted_as_allowed(seed, book_of)


class Forgetful(InvitationBook):
    """Negative control: counts uses in memory only."""

    def _keep(self, issued: object) -> None:
        if not getattr(issued, "machines"):  # noqa: B009
            super()._keep(issued)  # type: ignore[arg-type]


def test_the_check_of_limits_detects_a_book_that_does_not_count() -> None:
    def forgetful(journal: ViewJournal, clock: Clock) -> InvitationBook:
        return Forgetful(TOKEN, RUN, journal, Welcome(token=CONTENT, addresses=ADDRESSES), clock)

    def check() -> None:
        for seed in range(20):
            admitted_as_allowed(seed, forgetful)

    with pytest.raises(AssertionError):
        check()
