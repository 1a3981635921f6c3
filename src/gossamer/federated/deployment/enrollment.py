"""Enrollment: keeps which device has which number in a federation, in a file, so that a restart changes none."""

from __future__ import annotations

import json
from collections.abc import Collection, Container
from pathlib import Path

from gossamer.base.json_text import read_json
from gossamer.errors import CheckpointError, ConnectError
from gossamer.federated.deployment.files import replace_file


class Enrollment:
    """Numbers from 0 to `clients` - 1, each at most one device's.

    A number stays a device's while that is there or was never replaced; one whose device is away may be asked for by
    another, since a device that lost its state draws a new identity.
    """

    def __init__(self, clients: int, path: Path | None = None) -> None:
        """path: where it is kept. Raises CheckpointError for a damaged file."""
        self._clients, self._path = clients, path
        self._numbers: dict[int, int] = {}  # by device
        if path is not None and path.is_file():
            self._read(path)

    def number(self, device: int) -> int | None:
        """The number of a device that has joined."""
        return self._numbers.get(device)

    @property
    def numbers(self) -> Collection[int]:
        """All that a device has."""
        return self._numbers.values()

    def admit(self, device: int, wanted: int | None, present: Container[int], kept: Container[int] = ()) -> int:
        """The number of a device that joins. present: devices that are there. kept: numbers whose devices may be
        back, so that only who asks for one gets it.

        Raises ConnectError where it cannot have the number that it wants, or any, and CheckpointError where that cannot
        be kept: nothing has changed then.
        """
        if wanted is not None and wanted >= self._clients:
            raise ConnectError(
                f"There is no client {wanted} in a federation of {self._clients}: write --number 0 to "
                f"{self._clients - 1}, or leave it out."
            )
        holders = {number: holder for holder, number in self._numbers.items()}
        own = self._numbers.get(device)
        if own is not None and wanted in (None, own):
            return own
        number = self._free(holders, present, kept) if wanted is None else wanted
        holder = holders.get(number)
        if holder is not None and holder in present:
            raise ConnectError(
                f"Client {number} is there already, as another device. Give every device its own --number, or leave "
                "it out, so that the server chooses."
            )
        numbers = {each: own for each, own in self._numbers.items() if each != holder} | {device: number}
        self._write(numbers)
        self._numbers = numbers
        return number

    def _free(self, holders: dict[int, int], present: Container[int], kept: Container[int]) -> int:
        """A number that nobody ever had, or else one whose device is away and not expected back."""
        everyone = range(self._clients)
        never = (number for number in everyone if number not in holders)
        away = (number for number in everyone if holders.get(number) not in present and number not in kept)
        number = next(never, None)
        number = next(away, None) if number is None else number
        if number is None:
            raise ConnectError(
                f"All {self._clients} clients of this federation are there already, or may be back. Start its server "
                "with a larger --clients, leave this device out, or give it the --number of one that is gone for good."
            )
        return number

    def _read(self, path: Path) -> None:
        try:
            found = read_json(path.read_bytes())
            self._numbers = {int(device): int(number) for device, number in found.items()}
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}), so devices could get each other's numbers, and contributions could "
                "count twice. Put back a copy of the journal's folder, or begin a new one: --journal OTHER"
            ) from error

    def _write(self, numbers: dict[int, int]) -> None:
        if self._path is not None:
            replace_file(self._path, json.dumps({str(device): number for device, number in numbers.items()}))
