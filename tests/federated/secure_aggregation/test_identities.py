"""IdentityRoster: identities are kept for their owner only, files are read strictly, and nobody signs for another."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gossamer.base import system
from gossamer.errors import AttachError, MalformedError
from gossamer.federated.secure_aggregation import identities
from gossamer.federated.secure_aggregation.identities import Identity, IdentityRoster, SimulatedRoster


def test_an_identity_is_written_once_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    first = Identity.kept_at(path)
    assert Identity.kept_at(path) == first
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert repr(first) == "Identity()"
    path.write_bytes(b"short")
    with pytest.raises(AttachError, match=r"no identity: it has 5 bytes"):
        Identity.kept_at(path)


def test_a_full_disk_leaves_no_identity_file_that_is_refused_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "identity"

    def write_half(file: system.File, data: bytes) -> None:
        os.write(file.fileno(), data[:16])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(system, "write_all", write_half)
        with pytest.raises(OSError, match="No space left"):
            Identity.kept_at(path)
    assert Identity.kept_at(path) == Identity.kept_at(path)


def test_without_the_cryptography_package_no_identity_file_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise AttachError("install cryptography")

    monkeypatch.setattr(identities, "require_cryptography", refuse)
    with pytest.raises(AttachError, match="install"):
        Identity.kept_at(tmp_path / "identity")
    assert not (tmp_path / "identity").exists()


def test_a_roster_pins_who_signs(tmp_path: Path) -> None:
    one, two = Identity.new(), Identity.new()
    path = tmp_path / "roster"
    path.write_text("# devices\n\n" + IdentityRoster.line(3, one.public) + IdentityRoster.line(5, two.public))
    roster = IdentityRoster.read(path)
    roster.check(3, b"text", one.sign(b"text"))
    for client, signature in ((5, one.sign(b"text")), (3, one.sign(b"other")), (3, b"short")):
        with pytest.raises(MalformedError, match=f"client {client} are not signed"):
            roster.check(client, b"text", signature)
    with pytest.raises(MalformedError, match="client 4 is not in the roster"):
        roster.check(4, b"text", one.sign(b"text"))
    assert roster.identity(3) is None


def test_a_private_key_in_place_of_the_roster_is_refused(tmp_path: Path) -> None:
    (tmp_path / "identity").write_bytes(bytes(range(224, 256)))
    with pytest.raises(AttachError, match="is no roster: it is not text"):
        IdentityRoster.read(tmp_path / "identity")


def test_lines_that_are_none_are_named(tmp_path: Path) -> None:
    good = IdentityRoster.line(1, Identity.new().public)
    words = good.split()
    for bad in (
        "x y\n",
        "1\n",
        f"-1 {words[1]}\n",
        f"2 {words[1][:-4]}\n",
        good,
        f"2 {words[1]}\n",
        f"2 {words[1]} x\n",
    ):
        path = tmp_path / "roster"
        path.write_text(good + bad)
        with pytest.raises(AttachError, match="line 2 of the roster"):
            IdentityRoster.read(path)


def test_simulated_identities_are_alike_everywhere_and_unlike_each_other() -> None:
    roster = SimulatedRoster(seed=1)
    assert roster.public(4) == SimulatedRoster(seed=1).public(4) != SimulatedRoster(seed=2).public(4)
    roster.check(4, b"text", roster.identity(4).sign(b"text"))
    with pytest.raises(MalformedError, match="client 4"):
        roster.check(4, b"text", roster.identity(5).sign(b"text"))
