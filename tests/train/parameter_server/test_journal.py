"""A server that is killed at any moment goes on as if it had not been."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.direct_server import DirectServer, same_state
from support.server_runs import sgd
from support.virtual_workers import notices
from torch.optim import AdamW

from gossamer.base.peer_ops import SERVER, WORKER, Answer, Arrived, Ask, Peer, Push, Receipt, Stamp
from gossamer.errors import CheckpointError
from gossamer.train import checkpoint
from gossamer.train.parameter_server import ServerShard, keep, restore
from gossamer.train.parameter_server import journal as journals
from gossamer.train.parameter_server.delayed_nesterov import DelayedNesterov
from gossamer.train.parameter_server.journal import FileJournal
from gossamer.train.parameter_server.journal_entry import Entry, encode_entry, read_entries
from gossamer.train.parameter_server.update_policy import JOIN, LEAVE

RECIPES = [
    "ParameterServer(pull=TopK(0.3)) + Route(Feedback(TopK(0.2)), smallest=0)",
    'ParameterServer("sync")',
    'ParameterServer("stale", pull=OneBit()) + Route(Feedback(Int8()), smallest=0)',
    'ParameterServer("sync", backup=1)',
]


def adamw(tensors: Any) -> AdamW:
    return AdamW(list(tensors), 0.1)


Story = list[tuple[int, Ask | None]]  # (worker, op); None: it leaves


def story(server: DirectServer) -> Story:
    """Two workers push and pull, one twice, and one leaves and is late for it."""
    found: Story = []
    for step in range(4):
        found += [(0, server.push(0, step)), (0, server.pull(0)), (1, server.push(1, step)), (1, server.pull(1, step))]
    found += [(1, None), (0, server.push(0, 4)), (0, server.push(0, 5)), (1, server.push(1, 4)), (1, server.pull(1))]
    return found


def push_all(server: DirectServer, said: Story) -> Iterator[int]:
    """Send one op after the other; before each reply, which."""
    for number, (worker, op) in enumerate(said):
        if op is None:
            server.lose(worker)
            yield number
            continue
        token = len(server.ops)
        server.ops[token] = op
        event = Arrived(moment=0.0, token=token, sender=Peer(WORKER, worker), op=op)
        for reply in server.policy.react(server.shard, event):
            server.note([reply])
            yield number
        yield number


def log_of(directory: Path) -> Path:
    (path,) = (directory / "server-0").glob("log-*")
    return path


class Uninterrupted:
    """A story told to its end, with a journal. ends: how long the log was when each op was done with."""

    def __init__(self, recipe: str, directory: Path, journal: Callable[[FileJournal], Any] = lambda it: it) -> None:
        self.recipe, self.directory = recipe, directory
        self.server = DirectServer(recipe, optimizer=adamw)
        kept = keep(directory, self.server.shard)
        self.server.shard.journal = journal(kept)
        self.said = story(self.server)
        self.ends: dict[int, int] = {}
        for number in push_all(self.server, self.said):
            self.ends[number] = log_of(directory).stat().st_size
        kept.close()

    def resumed(self, log: bytes, again: int = 0) -> ServerShard:
        """Killed when the log was `log`. Ops that were not done with are sent again, and the last `again` pushes."""
        path = log_of(self.directory)
        whole = path.read_bytes()
        path.write_bytes(log)
        server = DirectServer(self.recipe, optimizer=adamw)
        shard = restore(self.directory, 0)
        assert shard is not None
        server.shard = shard
        server.note(server.policy.settle(shard))
        done = [number for number, end in self.ends.items() if end <= len(log)]
        twice = [each for each in self.said[: len(done)] if isinstance(each[1], Push)][-again:] if again else []
        for _ in push_all(server, [*twice, *self.said[len(done) :]]):
            pass
        assert isinstance(shard.journal, FileJournal)
        shard.journal.close()
        path.write_bytes(whole)
        return shard


def places(size: int, ends: list[int], count: int = 6) -> list[int]:
    """Some of all places before and after a whole entry, within its length, checksum, header and tensors."""
    found = {end + shift for end in ends for shift in (-9, -1, 0, 1, 8, 10, 14, 40)}
    return [0, *sorted(Random(size).sample([place for place in sorted(found) if 0 < place < size], count)), size]


def entry_ends(path: Path) -> list[int]:
    with path.open("rb") as file:
        return [end for _, end in read_entries(file, path.stat().st_size)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_promise_2_killed_anywhere_the_rest_gives_the_same_bits(recipe: str, tmp_path: Path) -> None:
    whole = Uninterrupted(recipe, tmp_path)
    log = log_of(tmp_path).read_bytes()
    for place in places(len(log), entry_ends(log_of(tmp_path))):
        same_state(whole.resumed(log[:place]), whole.server.shard)
    same_state(whole.resumed(log, again=5), whole.server.shard)


def test_what_is_torn_may_be_anything(tmp_path: Path) -> None:
    whole = Uninterrupted(RECIPES[0], tmp_path)
    log = bytearray(log_of(tmp_path).read_bytes())
    end = entry_ends(log_of(tmp_path))[9]
    log[end + 20] ^= 1  # the tenth entry is damaged, and so nothing after it is believed
    path = log_of(tmp_path)
    path.write_bytes(log)
    assert len(entry_ends(path)) == 10
    same_state(whole.resumed(bytes(log[:end]) + os.urandom(300)), whole.server.shard)


class TellsFirst:
    """Writes an entry when the next one comes: after its receipt was given."""

    def __init__(self, journal: FileJournal) -> None:
        self._journal, self._held = journal, list[Entry]()

    def write(self, entry: Entry) -> None:
        for earlier in self._held:
            self._journal.write(earlier)
        self._held = [replace(entry, payload=tuple(tensor.clone() for tensor in entry.payload))]


def test_a_receipt_before_its_record_is_found_out(tmp_path: Path) -> None:
    whole = Uninterrupted(RECIPES[1], tmp_path, TellsFirst)
    log = log_of(tmp_path).read_bytes()
    resumed = [whole.resumed(log[:place]) for place in entry_ends(log_of(tmp_path))[:6]]
    with pytest.raises(AssertionError):
        same_states(resumed, whole.server.shard)


def same_states(shards: list[ServerShard], expected: ServerShard) -> None:
    for shard in shards:
        same_state(shard, expected)


# -- a new state instead of a long log --------------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here."""


def killing(monkeypatch: pytest.MonkeyPatch, place: str, when: int, *, after: bool) -> None:
    """End the process in the `when`-th call of a function, before or after it did its work."""
    owner: Any = journals if place == "Log" else checkpoint
    work, calls = getattr(owner, place), iter(range(when + 1))

    def called(*given: Any, **named: Any) -> Any:
        last = next(calls, None) == when
        if last and not after:
            raise Killed
        result = work(*given, **named)
        if last:
            raise Killed
        return result

    monkeypatch.setattr(owner, place, called)


@pytest.mark.parametrize(
    ("place", "after"), [("stage", False), ("stage", True), ("complete", True), ("Log", False), ("Log", True)]
)
def test_killed_while_the_log_gives_way_to_a_new_state(
    place: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Uninterrupted(RECIPES[0], tmp_path / "whole").server.shard
    monkeypatch.setattr(journals, "STATES_PER_LOG", 0)
    monkeypatch.setattr(journals, "SHORTEST_LOG", 1500)
    for when in (1, 2):
        with monkeypatch.context() as patch:
            killing(patch, place, when, after=after)
            directory = tmp_path / str(when)
            server = DirectServer(RECIPES[0], optimizer=adamw)
            keep(directory, server.shard)
            said = story(server)
            done: list[int] = []
            with suppress(Killed):
                done.extend(push_all(server, said))
                raise AssertionError("it was never killed")
        shard = restore(directory, 0)
        assert shard is not None
        server.shard = shard
        server.note(server.policy.settle(shard))
        for _ in push_all(server, said[max(done, default=-1) + 1 :]):
            pass
        same_state(shard, expected)
        assert len(list((directory / "server-0").glob("log-*"))) <= 2


def test_the_log_stays_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "STATES_PER_LOG", 1)
    monkeypatch.setattr(journals, "SHORTEST_LOG", 0)
    server = DirectServer('ParameterServer("sync")', world=1, optimizer=sgd())
    keep(tmp_path, server.shard)
    entry = len(b"".join(encode_entry(Entry(command="take", about="x" * 300, payload=server.push(0, 0).payload))))
    for step in range(20):
        server.say(0, server.push(0, step))
        assert log_of(tmp_path).stat().st_size < 4 * entry
    assert len(checkpoint.complete_steps(tmp_path / "server-0", 0)) == 1


# -- disks ------------------------------------------------------------------------------------------------------------


def test_without_a_disk_the_server_continues_and_reports_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "STATES_PER_LOG", 0)
    monkeypatch.setattr(journals, "SHORTEST_LOG", 3000)
    with notices() as said:
        server = DirectServer('ParameterServer("sync")', world=1, optimizer=adamw)
        keep(tmp_path, server.shard)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full_disk)
            for step in range(9):
                server.say(0, server.push(0, step))
        assert len(said) == 1
        assert "No space left" in said[0]
        assert server.shard.version == 9
        assert restore(tmp_path, 0) is None, "an old state would be taken for the present one"
        assert (tmp_path / "server-0.stopped").is_dir()
        for step in range(9, 19):
            server.say(0, server.push(0, step))
    assert "written again" in said[1]
    shard = restore(tmp_path, 0)
    assert shard is not None
    same_state(shard, server.shard)


def full_disk(*ignored: Any) -> int:
    raise OSError(28, "No space left on device")


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    server = DirectServer('ParameterServer("sync")')
    keep(tmp_path, server.shard)
    (path,) = tmp_path.glob("server-0/step-*/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        restore(tmp_path, 0)


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    tensors = tuple(
        torch.arange(6).to(dtype).view(2, 3)
        for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.uint8, torch.bool, torch.int64)
    )
    entry = Entry(command="take", version=3, lr_factor=0.1, about='{"weight": 1.0}', payload=(*tensors, torch.empty(0)))
    path = tmp_path / "log"
    path.write_bytes(b"".join(encode_entry(entry)) * 2)
    with path.open("rb") as file:
        found = [each for each, _ in read_entries(file, path.stat().st_size)]
    for each in found:
        assert replace(each, payload=()) == replace(entry, payload=())
        assert [(t.dtype, t.tolist()) for t in each.payload] == [(t.dtype, t.tolist()) for t in entry.payload]
    assert len(found) == 2


def test_a_restored_server_continues_an_outer_momentum_within_a_round(tmp_path: Path) -> None:
    """The momentum, the differences since its last step and their shares, and the count of merged samples."""
    server = DirectServer(
        "AsyncDiLoCo(period=3, pull=Int8()) + Int8()", world=4, optimizer=lambda tensors: DelayedNesterov(list(tensors))
    )
    keep(tmp_path, server.shard)
    for step in range(3):
        for worker in range(4)[: 4 - step]:
            server.say(worker, server.push(worker, step))
            server.say(worker, server.pull(worker, at_least=server.shard.version))
    server.shard.journal.close()
    restored = restore(tmp_path, 0)
    assert restored is not None
    assert restored.merged == 9.0
    shares = [state["shares"] for state in restored.state_dict()["optimizer"]["state"].values()]
    assert shares, "there is no momentum"
    assert all(0 < share < 1 for share in shares), "the state is not within a round"
    same_state(server.shard, restored)
    restored.journal.close()


# -- A server that is restored, goes on, and is restored again ---------------------------------------------------------


def kept(directory: Path, text: str = "ParameterServer('sync')", **options: Any) -> DirectServer:
    server = DirectServer(text, optimizer=sgd(), **options)
    keep(directory, server.shard)
    return server


def journal_of(shard: ServerShard) -> FileJournal:
    assert isinstance(shard.journal, FileJournal)
    return shard.journal


def restored(directory: Path) -> ServerShard:
    """Also closes the journal, as a killed process does."""
    shard = restore(directory, 0)
    assert shard is not None
    shard.journal.close()
    return shard


def killed(server: DirectServer, directory: Path) -> None:
    """The server is another process from here on."""
    server.shard.journal.close()
    shard = restore(directory, 0)
    assert shard is not None
    server.shard = shard


@pytest.mark.parametrize("torn", [b"\0", bytes(5000)], ids=["a byte", "zeros"])
def test_what_follows_a_torn_entry_is_there_after_the_next_crash(torn: bytes, tmp_path: Path) -> None:
    server = kept(tmp_path)
    server.say(0, server.push(0, 0))
    (log,) = (tmp_path / "server-0").glob("log-*")
    with log.open("ab") as file:
        file.write(torn)
    killed(server, tmp_path)
    assert server.shard.staleness.total() == 1
    server.say(1, server.push(1, 0))
    server.say(0, server.push(0, 1))
    assert (server.shard.version, server.shard.staleness.total()) == (1, 3)
    same_state(restored(tmp_path), server.shard)


def announce(server: DirectServer, key: str, stamp: Stamp) -> list[Answer]:
    about = server.shard.spec.agreed_settings() if key == JOIN else ""
    return server.say(stamp.worker, Push(to=Peer(SERVER, 0), key=key, stamp=stamp, about=about))


def test_a_join_and_a_leave_that_come_again_after_a_new_state_count_once(tmp_path: Path) -> None:
    server = kept(tmp_path)
    announce(server, JOIN, Stamp(1, 0, 1))
    announce(server, LEAVE, Stamp(1, 0, 2))
    announce(server, JOIN, Stamp(1, 0, 3))
    journal_of(server.shard).save()  # nothing of it is replayed
    killed(server, tmp_path)
    announce(server, LEAVE, Stamp(1, 0, 2))
    assert server.shard.members == {0: 0, 1: 0}, "a leave of before a join that was answered"
    announce(server, LEAVE, Stamp(1, 0, 4))
    journal_of(server.shard).save()
    killed(server, tmp_path)
    (answer,) = announce(server, JOIN, Stamp(1, 0, 3))
    assert isinstance(answer, Receipt)
    assert answer.version == -1
    assert server.shard.members == {0: 0}, "a join of before a leave that was answered"
    same_state(restored(tmp_path), server.shard)


def test_a_state_that_is_written_within_a_change_has_nothing_of_it(tmp_path: Path) -> None:
    """The log gives way to a state as a command is to be written: the state is of before, and the entry follows."""
    commands: dict[str, Callable[[DirectServer], Any]] = {
        "take": lambda server: server.say(0, server.push(0, 0)),
        "apply": lambda server: server.say(1, server.push(1, 0)),
        "join": lambda server: announce(server, JOIN, Stamp(1, 3, 1)),
        "leave": lambda server: announce(server, LEAVE, Stamp(1, 4, 2)),
        "drop": lambda server: server.shard.drop(Stamp(0, 2)),
        "skip": lambda server: server.shard.skip(7),
        "lose": lambda server: server.lose(0),
        "meet": lambda server: server.shard.all_left(),
    }
    server = kept(tmp_path)
    journal, seen = journal_of(server.shard), set[str]()
    write = journal.write

    def saving(entry: Entry) -> None:
        journal.save()
        seen.add(entry.command)
        write(entry)

    journal.write = saving  # type: ignore[method-assign]
    for name, command in commands.items():
        command(server)
        assert name in seen
        same_state(restored(tmp_path), server.shard)


# -- a pull compressor that remembers ---------------------------------------------------------------------------------

MEMORY = "ParameterServer('sync', pull=Route(PowerSGD(rank=1), smallest=0))"


def test_a_pull_compressor_with_memory_continues_where_it_was(tmp_path: Path) -> None:
    calm, server = DirectServer(MEMORY, world=1, optimizer=sgd()), kept(tmp_path, MEMORY, world=1)
    assert any(server.shard.public.state_dict()["states"]), "it remembers nothing"
    for step in range(6):
        for each in (calm, server):
            each.say(0, each.push(0, step))
            (pulled,) = each.say(0, each.pull(0, step + 1))
            each.workers[0].replica.update(pulled)  # type: ignore[arg-type]
        same_state(calm.shard, server.shard)
        if step % 2:
            journal_of(server.shard).save()
        killed(server, tmp_path)
