"""Agent store: lets PyTorch's launcher meet at one address of this machine instead of at all of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from gossamer.comm.environment.interruptible_call import interruptible
from gossamer.comm.environment.listening import LOOPBACK, dialable
from gossamer.comm.environment.wait_timeout import USUAL_SECONDS, engine_timeout
from gossamer.launch.job import Job
from gossamer.launch.rendezvous import listen_at, split_endpoint

BACKEND = "gossamer"

Met = Callable[[TCPStore, str], None]


def nobody_asks(store: TCPStore, address: str) -> None:
    """The machines have met, and nobody has anything to tell in their store."""


class AgentRendezvous(RendezvousHandler):
    """As PyTorch's static rendezvous, whose store listens on every address: machine 0 serves, the others come there.

    met: called once they have, with their store and the address at which machine 0 listens, or by which it is reached.
    Raises ConnectError where machine 0 cannot listen; torch.distributed.DistError where the machines do not come.
    """

    def __init__(self, job: Job, met: Met = nobody_asks) -> None:
        self._job, self._met = job, met
        self._store: TCPStore | None = None
        self.run = ""  # the run's name, the same on all machines; known after the first rendezvous
        self._host, self._port = LOOPBACK, 0
        self._listener = None
        if job.rendezvous is not None:
            self._host, self._port = split_endpoint(job.rendezvous)
        self._address = self._host
        if job.node_rank == 0:
            self._listener = listen_at(job.rendezvous, several_machines=job.nodes > 1, interface=job.interface)
            self._address = str(self._listener.getsockname()[0])
            self._host, self._port = dialable(self._listener, self._host), self._listener.getsockname()[1]

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store = interruptible(self._meet, look=lambda: None)
            self._met(self._store, self._address)
            self.run = self._store.compare_set("run", "", secrets.token_hex(8)).decode()
        place = RendezvousStoreInfo(self._host, self._port)
        return RendezvousInfo(PrefixStore(BACKEND, self._store), self._job.node_rank, self._job.nodes, place)

    def _meet(self) -> TCPStore:
        return TCPStore(
            self._host,
            self._port,
            self._job.nodes,
            is_master=self._listener is not None,
            timeout=engine_timeout() or timedelta(seconds=USUAL_SECONDS),
            # From here on the descriptor is the store's
            master_listen_fd=None if self._listener is None else self._listener.detach(),
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return BACKEND

    def shutdown(self) -> bool:
        return True
