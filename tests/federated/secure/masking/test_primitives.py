"""Primitives: as the standards say, and without the package a line that says what to install."""

from __future__ import annotations

import sys

import pytest

from gossamer.errors import AttachError, MalformedError
from gossamer.federated.secure_aggregation.masking import AgreementKey, commitment, opened, require_cryptography, sealed


def test_both_ends_agree_on_a_key_for_each_purpose() -> None:
    one, two = AgreementKey(), AgreementKey()
    assert one.agreed(two.public, b"masks") == two.agreed(one.public, b"masks") != one.agreed(two.public, b"shares")
    assert AgreementKey(one.private).public == one.public
    for public in (bytes(32), b"short"):  # of small order, and none
        with pytest.raises(MalformedError, match="none that keys can be agreed with"):
            one.agreed(public, b"masks")


def test_the_curve_is_the_standards() -> None:
    """RFC 7748, section 6.1: Alice's keys."""
    private = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c1f9e5f5c1f9e5f5c1f9e5f5c1f9e")
    assert AgreementKey(private).private == private


def test_what_was_sealed_opens_unchanged_only() -> None:
    key = b"k" * 32
    closed = sealed(key, b"shares", b"for one")
    assert opened(key, closed, b"for one") == b"shares"
    changed = bytes([closed[0] ^ 1]) + closed[1:]
    for wrong in (opened(key, changed, b"for one"), opened(b"l" * 32, closed, b"for one"), opened(key, closed, b"")):
        assert wrong is None
    assert commitment(b"1" * 32) != commitment(b"2" * 32)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    require_cryptography.cache_clear()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.x25519", None)
    with pytest.raises(AttachError, match=r"pip install 'gossamer\[federated\]'"):
        require_cryptography()
    monkeypatch.undo()
    require_cryptography()
