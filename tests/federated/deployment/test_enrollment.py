"""Enrollment: numbers stay with their devices over restarts, and never have two."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.errors import CheckpointError, ConnectError
from gossamer.federated.deployment.reception import Enrollment


def test_numbers_stay_with_their_devices(tmp_path: Path) -> None:
    path = tmp_path / "enrollment.json"
    first = Enrollment(4, path)
    assert [first.admit(device, wanted, ()) for device, wanted in ((70, None), (71, 2), (72, None), (70, None))] == [
        0, 2, 1, 0,
    ]  # fmt: skip
    again = Enrollment(4, path)
    assert [again.number(device) for device in (70, 71, 72, 73)] == [0, 2, 1, None]


def test_a_number_has_one_device() -> None:
    numbers = Enrollment(2)
    numbers.admit(70, 0, ())
    with pytest.raises(ConnectError, match="Client 0 is there already"):
        numbers.admit(71, 0, {70})
    assert numbers.admit(71, 0, ()) == 0  # the other was away: perhaps it lost its state
    assert numbers.number(70) is None
    assert numbers.admit(70, None, {71}) == 1
    with pytest.raises(ConnectError, match="All 2 clients"):
        numbers.admit(72, None, {70, 71})
    assert numbers.admit(72, None, {71}) == 1
    with pytest.raises(ConnectError, match="no client 2 in a federation of 2"):
        numbers.admit(73, 2, ())


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "enrollment.json"
    path.write_text("[1, 2")
    with pytest.raises(CheckpointError, match="each other's numbers"):
        Enrollment(2, path)


def test_a_number_whose_device_may_be_back_is_for_who_asks_for_it() -> None:
    numbers = Enrollment(2)
    for device in (70, 71):
        numbers.admit(device, None, ())
    with pytest.raises(ConnectError, match=r"All 2 clients .* may be back"):
        numbers.admit(72, None, {71}, kept={0})
    assert numbers.admit(72, None, {71}, kept={1}) == 0
    assert numbers.admit(70, 0, {71}, kept={0, 1}) == 0


def test_what_cannot_be_kept_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "enrollment.json"
    numbers = Enrollment(2, path)
    numbers.admit(70, None, ())
    path.unlink()
    path.mkdir()
    (path / "file").touch()  # nothing can take its place
    for wanted in (None, 0):
        with pytest.raises(CheckpointError, match="cannot be written"):
            numbers.admit(71, wanted, ())
    assert [numbers.number(device) for device in (70, 71)] == [0, None]
    assert numbers.admit(70, None, ()) == 0
