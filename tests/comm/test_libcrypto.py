"""libcrypto: which library is called, and one message that it encrypts and authenticates."""

from __future__ import annotations

import ctypes
import secrets
import ssl
import sys
from collections.abc import Iterator

import pytest
from support.aead import aes_gcm_opened

from gossamer.comm import libcrypto
from gossamer.comm.libcrypto import CIPHERS, cipher_functions, seal, unseal
from gossamer.errors import ConnectError, MalformedError

KEY, NONCE = bytes(range(32)), bytes(12)
SEALED = seal(KEY, NONCE, b"token")


@pytest.fixture
def forgotten() -> Iterator[None]:
    libcrypto.libcrypto.cache_clear()
    yield
    libcrypto.libcrypto.cache_clear()


def test_it_is_the_library_that_ssl_calls(forgotten: None) -> None:
    number = libcrypto.libcrypto().OpenSSL_version_num
    number.restype = ctypes.c_ulong
    assert number() == ssl.OPENSSL_VERSION_NUMBER


def test_a_hidden_library_is_an_error_with_a_remedy(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcrypto, "_candidates", lambda: iter(["/there/is/none.so"]))
    with pytest.raises(ConnectError, match=r"OpenSSL, which is hidden.*install libcrypto"):
        libcrypto.libcrypto()


def test_a_library_without_the_functions_is_passed_over(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = libcrypto._candidates()
    with_none = "libm.dylib" if sys.platform == "darwin" else "libm.so.6"
    monkeypatch.setattr(libcrypto, "_candidates", lambda: iter([with_none, first]))
    assert libcrypto.libcrypto()._name == first


def test_every_cipher_is_there() -> None:
    for cipher in CIPHERS:
        assert all(cipher_functions(cipher))


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 4096])
def test_a_sealed_message_is_opened_by_another_implementation_of_aes_gcm(size: int) -> None:
    key, nonce, content = secrets.token_bytes(32), secrets.token_bytes(12), secrets.token_bytes(size)
    sealed = seal(key, nonce, content)
    assert len(sealed) == size + 16
    assert unseal(key, nonce, sealed) == aes_gcm_opened(key, nonce, sealed) == content


def test_sealing_matches_the_vector_of_the_gcm_specification() -> None:
    """Test case 14 of McGrew & Viega: key, nonce and 16 bytes, all zero."""
    sealed = seal(bytes(32), bytes(12), bytes(16))
    assert sealed.hex() == "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"


@pytest.mark.parametrize("place", range(len(SEALED)))
def test_a_changed_message_is_refused(place: int) -> None:
    changed = bytearray(SEALED)
    changed[place] ^= 1
    with pytest.raises(MalformedError, match="changed"):
        unseal(KEY, NONCE, bytes(changed))


@pytest.mark.parametrize("message", [b"", SEALED[:15], SEALED[:-1], SEALED[1:]])
def test_a_part_of_a_message_is_refused(message: bytes) -> None:
    with pytest.raises(MalformedError):
        unseal(KEY, NONCE, message)


@pytest.mark.parametrize(("key", "nonce"), [(bytes(32), NONCE), (KEY, b"another word")])
def test_another_key_or_nonce_opens_nothing(key: bytes, nonce: bytes) -> None:
    with pytest.raises(MalformedError, match="another key"):
        unseal(key, nonce, SEALED)


@pytest.mark.parametrize(("key", "nonce"), [(b"short", NONCE), (KEY, b"short")])
def test_a_key_or_nonce_of_another_length_is_refused(key: bytes, nonce: bytes) -> None:
    with pytest.raises(ValueError, match="32 bytes of key and 12"):
        seal(key, nonce, b"")
