"""Journal of rounds: a server that was killed at any moment goes on to the same bits; a full disk stops nobody."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_disk import watched
from support.federated_faults import (
    SAMPLES,
    Buffered,
    MemoryJournal,
    WholeMomentum,
    WholeNumbers,
    WholeSteps,
    check_conserved,
    sparse,
)
from support.killed_server import Desk, Killed, killed_after
from support.rounds_by_hand import ByHand

from gossamer.algorithms.compressors import TopK
from gossamer.algorithms.strategies.federated_rules import CentralPrivacy
from gossamer.base.peer_ops import Reply
from gossamer.errors import CheckpointError
from gossamer.federated.server import journal
from gossamer.federated.server.roster import RosterChange
from gossamer.federated.server.rounds import Rounds


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def everyone(**options: Any) -> WholeNumbers:
    strategy = WholeMomentum(fraction=1.0, pull=TopK(density=0.2))
    return WholeNumbers(strategy, sparse(), rounds=2, options={"fewest": len(SAMPLES)}, **options)


def buffered(**options: Any) -> WholeNumbers:
    return WholeNumbers(Buffered(fraction=1.0), sparse(), rounds=3, **options)


KINDS: dict[str, Callable[..., WholeNumbers]] = {"everyone": everyone, "buffered": buffered}


@pytest.mark.parametrize("name", KINDS)
def test_a_server_killed_after_any_of_its_ops_continues(name: str) -> None:
    calm = KINDS[name]()
    ops = killed_after(calm, 0).ops
    check_conserved(calm)
    assert ops > 20
    for last in range(1, ops + 1):
        done = KINDS[name]()
        assert killed_after(done, last).kills == 1
        check_conserved(done)
        if name == "everyone":
            assert torch.equal(done.parameters, calm.parameters)


def on_disk(directory: Path) -> Callable[[Rounds], Any]:
    return lambda rounds: journal.keep(directory, rounds)


@pytest.mark.parametrize("name", KINDS)
def test_a_server_killed_wherever_it_touches_the_disk_continues(name: str, tmp_path: Path) -> None:
    """Also in the middle of a write."""
    calm, place = KINDS[name](keep=on_disk(tmp_path / "calm")), tmp_path / "calm"
    place.mkdir()
    with watched(place) as disk:
        Desk(calm).run()
        touches = len(disk.names)
    assert touches > 30
    for at in range(0, touches, 5):
        root = tmp_path / f"killed-{at}"
        root.mkdir()
        done = KINDS[name](keep=on_disk(root))
        with watched(root, kill_at(at)):
            desk = Desk(done)
            desk.run()
        assert desk.kills == 1
        check_conserved(done)
        if name == "everyone":
            assert torch.equal(done.parameters, calm.parameters)


def kill_at(at: int) -> Callable[[int, str], None]:
    killed: list[int] = []

    def before(number: int, name: str) -> None:
        if number == at and not killed:
            killed.append(number)
            raise Killed

    return before


def test_a_torn_line_was_never_acted_on_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    done = everyone(keep=on_disk(tmp_path))
    desk = Desk(done, kill_after=12)
    with pytest.raises(Killed):
        one_life(desk)
    (path,) = tmp_path.rglob("log-*")
    whole = path.read_bytes()
    assert whole.count(b"\n") >= 1
    path.write_bytes(whole + b'12345678 [1, 2, {"0"')
    rounds = done.start()
    assert sorted(rounds.assigned) == [0, 1, 2, 3]
    path.write_bytes(whole.replace(b"[0, 4", b"[7, 4"))
    with pytest.raises(CheckpointError, match="checksum"):
        done.start()


def one_life(desk: Desk) -> None:
    """Run until the server is killed."""
    start = desk.done.start

    def once() -> Rounds:
        desk.done.start = died  # type: ignore[method-assign]
        return start()

    def died() -> Rounds:
        desk.done.start = start  # type: ignore[method-assign]
        raise KeyboardInterrupt

    desk.done.start = once  # type: ignore[method-assign]
    try:
        desk.run()
    except KeyboardInterrupt:
        raise Killed from None


def test_a_damaged_state_and_one_of_others_are_refused(tmp_path: Path) -> None:
    Desk(everyone(keep=on_disk(tmp_path))).run()
    with pytest.raises(CheckpointError, match="with recipe"):
        WholeNumbers(keep=on_disk(tmp_path)).start()
    (path,) = tmp_path.rglob("*.safetensors")
    read = bytearray(path.read_bytes())
    read[-1] ^= 1
    path.write_bytes(read)
    with pytest.raises(CheckpointError, match="damaged"):
        everyone(keep=on_disk(tmp_path)).start()


def test_a_full_disk_is_reported_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = everyone(keep=on_disk(tmp_path))
    full = [False]

    def before(number: int, name: str) -> None:
        if full[0] and name in ("write", "mkdir", "replace"):
            raise OSError(errno.ENOSPC, "No space left on device")

    commits = done.ledger.commits
    done.rounds = 5
    with watched(tmp_path, before):
        done.change = lambda rounds: _watch(rounds, lambda: full.__setitem__(0, 1 <= len(commits) <= 2))
        Desk(done).run()
    check_conserved(done)
    said = [record.message for record in caplog.records if "journal" in record.message]
    assert len(said) == 2
    assert "continues without it" in said[0]
    assert "written again" in said[1]
    assert done.start().model.version == 5


def private(**options: Any) -> WholeNumbers:
    privacy = CentralPrivacy(2.0, clip=100.0, delta=0.01, sampling="fixed")
    return WholeNumbers(WholeSteps(fraction=1.0, privacy=privacy), rounds=4, **options)


@pytest.mark.parametrize("written", [1, 2])
def test_a_full_disk_stops_a_server_that_counts_privacy(written: int, tmp_path: Path) -> None:
    """It would begin anew from what it has, and spend what is spent already."""
    done = private(keep=on_disk(tmp_path))
    commits = done.ledger.commits

    def full(number: int, name: str) -> None:
        if len(commits) >= written and name in ("write", "mkdir", "replace"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with watched(tmp_path, full), pytest.raises(CheckpointError, match="could spend the budget of devices twice"):
        Desk(done).run()
    assert [each.version for each in commits] == list(range(1, written + 1))
    Desk(done).run()  # there is space again, and all processes are new
    assert [each.version for each in commits] == [1, 2, 3, 4]
    calm = private()
    Desk(calm).run()
    assert [each.epsilon for each in commits] == [each.epsilon for each in calm.ledger.commits]


@pytest.mark.parametrize(("written", "ops", "made"), [("never", 20, [3, 3, 4, 5]), ("soon", 10, [3, 4, 5])])
def test_a_server_killed_while_its_disk_is_full_continues_from_the_last_whole_version(
    written: str, ops: int, made: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where only one line of its log could not be written. What it made since is lost, so the past is another."""
    done = everyone(keep=on_disk(tmp_path))
    Desk(done).run()
    assert done.held is not None
    past, before = done.held.model.lineage, len(done.ledger.commits)
    starts, refused = list[Rounds](), list[str]()
    done.rounds, done.change = 5, starts.append

    def full(number: int, name: str) -> None:
        if len(starts) == 1 and name in ("write", "mkdir", "replace") and (written == "never" or not refused):
            refused.append(name)
            raise OSError(errno.ENOSPC, "No space left on device")

    with watched(tmp_path, full):
        Desk(done, kill_after=ops).run()
    assert refused
    assert [each.version for each in done.ledger.commits[before:]] == made
    assert starts[0].model.lineage == past
    assert starts[1].model.lineage != past
    assert "later ones are lost" in "".join(record.message for record in caplog.records)
    assert not (tmp_path / "rounds.stopped").exists()
    again = done.start()
    assert (again.model.version, again.model.lineage) == (5, starts[1].model.lineage)


@pytest.mark.parametrize("synced", [True, False])
def test_a_round_that_devices_know_outlives_a_machine_that_loses_power(
    synced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that was given up is in no version. In the twin, which waits for no disk, it is forgotten."""
    if not synced:
        monkeypatch.setattr(journal.Log, "sync", lambda log: None)
    root = tmp_path / "before"
    root.mkdir()
    with watched(root) as disk:
        hand = ByHand(everyone(keep=on_disk(root)).start())
        hand.ask(0, 1, 2, 3)
        for client in range(4):
            hand.report(client, samples=0)
        hand.ask(0, 1, 2, 3)
        assert hand.taken_tasks(range(4)) == [1] * 4
        disk.after_power_failure(tmp_path / "after", seed=None)
    assert everyone(keep=on_disk(tmp_path / "after")).start().next_round == (1 if synced else 0)


def _watch(rounds: Rounds, look: Callable[[], Any]) -> None:
    react = rounds.react

    def looking(event: Any) -> Iterator[Reply]:
        look()
        return react(event)

    rounds.react = looking  # type: ignore[method-assign]


def test_what_is_restored_is_the_same_to_the_bit(tmp_path: Path) -> None:
    for name, make in KINDS.items():
        done = make(keep=on_disk(tmp_path / name))
        Desk(done).run()
        held = done.held
        assert held is not None
        again = done.start()
        kept, had = again.state_dict(), held.state_dict()
        for each in ("counted", "known"):  # devices come, and know their fate, between versions
            del kept["roster"][each], had["roster"][each]
        assert str(kept) == str(had)
        assert torch.equal(again.model.parameters, held.model.parameters)


# -- what must not be written later -----------------------------------------------------------------------------------


class Lazy(MemoryJournal):
    """The broken twin: what it is told is kept at the next event, once answers have left."""

    def __init__(self, lazy: str) -> None:
        super().__init__()
        self._lazy, self._due = lazy, list[Callable[[], None]]()

    def changed(self, change: RosterChange) -> None:
        self._later("changed", lambda: MemoryJournal.changed(self, change))

    def committed(self, rounds: Rounds) -> None:
        self._later("committed" if self.state else "", lambda: MemoryJournal.committed(self, rounds))

    def _later(self, what: str, write: Callable[[], None]) -> None:
        if what == self._lazy:
            self._due.append(write)
        else:
            write()

    def keep(self, rounds: Rounds) -> None:
        self._due.clear()
        super().keep(rounds)
        _watch(rounds, self._write)

    def _write(self) -> None:
        due, self._due = self._due, []
        for write in due:
            write()


@pytest.mark.parametrize("lazy", ["changed", "committed"])
def test_a_journal_written_after_the_answers_is_caught(lazy: str) -> None:
    """Tasks that nobody remembers giving, and receipts for a version that is gone."""
    calm = everyone()
    ops = killed_after(calm, 0).ops
    caught = 0
    for last in range(1, ops + 1):
        done = everyone(keep=Lazy(lazy).keep)
        try:
            killed_after(done, last)
            check_conserved(done)
            assert torch.equal(done.parameters, calm.parameters)
            assert len(done.ledger.given) == len(calm.ledger.given), "a device trained for nothing"
        except AssertionError:
            caught += 1
        if caught > 2:
            return
    raise AssertionError(f"killed after any op, it was seen {caught} times only")
