"""Views of real processes: where one is killed, the others hear of it at once, and meet again by their group."""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from support.processes import SOON_SECONDS, environment

from gossamer.base.kernels.library import are_built
from gossamer.comm.membership import Member, View

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not are_built(), reason="the compiled loops are not there"),
]

WORLD, TOKEN = 4, bytes(range(32))
WORKER = f"""
import sys
import torch
from gossamer.base.ops import AllReduceMean
from gossamer.errors import PeerLost
from gossamer.comm.membership import View
from gossamer.comm.elastic.view_listener import ViewListener
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.standalone import standalone_mesh

torch.set_num_threads(1)
number, steps = int(sys.argv[1]), 0
here = ViewListener("127.0.0.1")
print(here.address[1], flush=True)
for line in sys.stdin:
    view = View.of(line)
    sockets = here.meet(view, number, {TOKEN!r}, 30.0, lambda: False)
    links = Links.alike(((0.0001,) * view.world,) * view.world, 1e9)
    mesh = standalone_mesh(view.rank_of(number), sockets, "ring", links, gives_notice=False)
    print("meets", view.number, flush=True)
    try:
        while True:
            mean = mesh.answer(AllReduceMean(torch.full((100_000,), float(number))))
            if steps % 20 == 0:
                print("mean", mean[0].item(), flush=True)
            steps += 1
    except PeerLost as lost:
        print("lost", lost, flush=True)
"""


class Workers:
    """Processes of which each waits for a view on its standard input."""

    def __init__(self, stack: ExitStack) -> None:
        self.processes = []
        for rank in range(WORLD):
            command = [sys.executable, "-c", WORKER, str(100 + rank)]
            worker = subprocess.Popen(
                command, env=environment(rank, WORLD, 0), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self.processes.append(stack.enter_context(worker))
            stack.callback(worker.kill)
        self.ports = [int(self.line(rank)) for rank in range(WORLD)]

    def line(self, rank: int) -> str:
        stream = self.processes[rank].stdout
        assert stream is not None
        return stream.readline()

    def until(self, rank: int, beginning: str) -> str:
        while line := self.line(rank):
            if line.startswith(beginning):
                return line
        raise AssertionError(f"rank {rank} ended before it said {beginning!r}")

    def tell(self, number: int, ranks: list[int]) -> None:
        members = tuple(Member(number=100 + rank, host="127.0.0.1", port=self.ports[rank]) for rank in ranks)
        view = View(number=number, members=members, newcomers=frozenset(), secret=secrets.token_bytes(32))
        for rank in ranks:
            stream = self.processes[rank].stdin
            assert stream is not None
            print(view.text(), file=stream, flush=True)


def test_the_others_hear_at_once_of_one_that_is_killed_and_continue_in_the_next_view():
    with ExitStack() as stack:
        workers = Workers(stack)
        workers.tell(1, [0, 1, 2, 3])
        assert {workers.until(rank, "mean") for rank in range(WORLD)} == {"mean 101.5\n"}
        workers.processes[2].send_signal(signal.SIGKILL)
        began = time.monotonic()
        told = [workers.until(rank, "lost") for rank in (0, 1, 3)]
        assert time.monotonic() - began < SOON_SECONDS  # milliseconds where nothing else runs
        assert all(re.search(r"rank 2 is gone|is gone .*and so (is|are) ranks? [^:]*\b2\b", each) for each in told), (
            told
        )
        workers.tell(2, [0, 1, 3])
        assert [workers.until(rank, "meets") for rank in (0, 1, 3)] == ["meets 2\n"] * 3
        assert len({workers.until(rank, "mean") for rank in (0, 1, 3)}) == 1
