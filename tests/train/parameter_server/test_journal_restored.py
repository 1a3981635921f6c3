"""A server that is restored, goes on, and is restored again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.direct_server import DirectServer, same_state
from support.server_runs import sgd

from gossamer.base.peer_ops import SERVER, Answer, Peer, Push, Receipt, Stamp
from gossamer.train.parameter_server import ServerShard, keep, restore
from gossamer.train.parameter_server.journal import FileJournal
from gossamer.train.parameter_server.journal_entry import Entry
from gossamer.train.parameter_server.update_policy import JOIN, LEAVE


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


def test_a_pull_compressor_with_memory_goes_on_where_it_was(tmp_path: Path) -> None:
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
