"""Meeting place: the address where the workers meet, at rank 0 itself or found through a launcher's store."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from gossamer.comm.environment.launcher_env import JobEnvironment
from gossamer.comm.environment.listening import dialable, listen_as
from gossamer.comm.environment.tcp_store import hosted_store, remote_store

Address = tuple[str, int]
AGENT_SECONDS = 10.0  # for the launcher's store to answer: it starts before any worker


class NotAnnounced(ConnectionRefusedError):
    """Rank 0 has not published its address."""


class MeetingPlace(ABC):
    """How ranks find the meeting in rank 0 and torch's store.

    Args:
        job: Place of this process in the job.
        address: Address of the interface for this job's traffic, if known.
    """

    def __init__(self, job: JobEnvironment, address: str | None) -> None:
        self._job = job
        self._address = address

    @abstractmethod
    def listen(self) -> socket.socket:
        """Return rank 0's listener. Raises OSError, with EADDRINUSE if another process has the address."""

    @abstractmethod
    def locate(self) -> Address:
        """Return rank 0's address. Raises OSError if it is not known yet."""

    @abstractmethod
    def store(self, port: int, host: str) -> Store:
        """Return the store, at port `port` of `host`. Raises RuntimeError if it does not answer."""

    @abstractmethod
    def store_port(self) -> int:
        """At rank 0, after `listen`: the port of its store; 0 if the launcher has the store."""

    def _listen(self, host: str, port: int) -> socket.socket:
        several = self._job.local_world < self._job.world
        return listen_as(host, port, several_machines=several, interface_address=self._address)


class AtRankZero(MeetingPlace):
    """Rank 0 listens at MASTER_ADDR and MASTER_PORT, and also hosts torch's store, for authenticated ranks only."""

    def __init__(self, job: JobEnvironment, address: str | None) -> None:
        super().__init__(job, address)
        self._here = (job.master_address or "", job.master_port or 0)
        self._served: Store | None = None

    def listen(self) -> socket.socket:
        host, port = self._here
        listener = self._listen(host, port)
        self._here = dialable(listener, host), port
        return listener

    def locate(self) -> Address:
        return self._here

    def store_port(self) -> int:
        listener = self._listen(self._here[0], 0)
        port = int(listener.getsockname()[1])
        self._served = hosted_store(self._here[0], listener)
        return port

    def store(self, port: int, host: str) -> Store:
        return self._served or remote_store(host, port)


class ByAgentStore(MeetingPlace):
    """A launcher's store, which has no secret, holds rank 0's address. Raises OSError if it does not answer."""

    def __init__(self, job: JobEnvironment, address: str | None) -> None:
        super().__init__(job, address)
        host, port = job.master_address or "", job.master_port or 0
        socket.create_connection((host, port), AGENT_SECONDS).close()  # torch's own client prints stack traces
        try:
            self._agent = remote_store(host, port, timeout=timedelta(seconds=AGENT_SECONDS))
        except RuntimeError as problem:
            raise OSError(str(problem).splitlines()[0]) from problem
        # The store persists when the workers restart
        self._pin = f"gossamer/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/meeting"

    def listen(self) -> socket.socket:
        host = self._address or self._job.master_address or ""
        listener = self._listen(host, 0)
        here = f"{dialable(listener, host)}:{listener.getsockname()[1]}"
        try:
            if (held := self._agent.compare_set(self._pin, "", here).decode()) != here:
                self._replace(held, here)
        except BaseException:
            listener.close()
            raise
        return listener

    def _replace(self, held: str, here: str) -> None:
        """Take over from a rank 0 that has ended."""
        try:
            socket.create_connection(_address(held), 1.0).close()
        except OSError:
            self._agent.set(self._pin, here)
            return
        raise FileExistsError(f"another worker is already present as rank {self._job.rank}, at {held}")

    def locate(self) -> Address:
        try:
            if not self._agent.check([self._pin]):
                raise NotAnnounced("it has not joined the meeting")
            return _address(self._agent.get(self._pin).decode(errors="replace"))
        except RuntimeError as problem:
            raise ConnectionRefusedError(str(problem).splitlines()[0]) from None

    def store_port(self) -> int:
        return 0

    def store(self, port: int, host: str) -> Store:
        return self._agent


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise ConnectionRefusedError(f"invalid rendezvous address {text[:60]!r}")
    return host, int(port)


def meeting_place(job: JobEnvironment, address: str | None) -> MeetingPlace:
    """Choose the meeting place for this launcher. Raises OSError if the launcher's store does not answer."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return ByAgentStore(job, address)
    return AtRankZero(job, address)
