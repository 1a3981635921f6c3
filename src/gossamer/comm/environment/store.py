"""Rendezvous store: a key-value store of texts that all ranks share before they can reach each other."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from gossamer.comm.environment.listening import listen_as
from gossamer.errors import ConnectError


class RendezvousStore:
    """The job's key-value store, with keys prefixed by `name`. serves: this process hosts it."""

    def __init__(self, name: str, address: str, port: int, *, serves: bool, seconds: float) -> None:
        self._where = f"{address}:{port}"
        try:
            # The store owns the descriptor from here on
            listener = self._listen(address, port) if serves else None
            store = TCPStore(
                address,
                port,
                is_master=serves,
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,
                master_listen_fd=listener,
            )
        except (OSError, RuntimeError) as error:
            raise ConnectError(
                f"cannot connect to the rendezvous at {self._where} ({str(error).splitlines()[0]}). Rank 0 was not "
                "started, the address is wrong, or a firewall drops the packets. Start all workers within a few "
                "seconds of each other, and open that port."
            ) from error
        self._store = PrefixStore(name, store)

    @staticmethod
    def _listen(address: str, port: int) -> int:
        """Listen at this address only; torch itself would listen at all addresses of the machine."""
        return listen_as(address, port, several_machines=False, interface_address=None).detach()

    def pin(self, topic: str, text: str) -> None:
        self._store.set(topic, text)

    def read(self, topic: str, seconds: float) -> str:
        """Wait for the text under this topic and return it. Raises TimeoutError after `seconds`."""
        try:
            self._store.wait([topic], timedelta(seconds=seconds))
            return str(self._store.get(topic).decode())
        except RuntimeError as error:
            raise TimeoutError(f"no value for {topic} arrived at {self._where} within {seconds:g} s") from error

    def everyone(self, topic: str, rank: int, world: int, text: str, seconds: float) -> list[str]:
        """All-gather a text. Raises ConnectError with the missing ranks."""
        keys = [f"{topic}/{each}" for each in range(world)]
        self.pin(keys[rank], text)
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
            return [self._store.get(key).decode() for key in keys]
        except RuntimeError as error:
            missing = [each for each, key in enumerate(keys) if not self._there(key)]
            raise ConnectError(
                f"{len(missing)} of {world} workers did not reach the rendezvous at {self._where} within "
                f"{seconds:g} s: ranks {missing}. Check their machines, and start all workers together."
            ) from error

    def _there(self, key: str) -> bool:
        try:
            return self._store.check([key])
        except RuntimeError:
            return False  # the store itself has ended
