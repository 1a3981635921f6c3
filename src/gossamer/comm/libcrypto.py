"""libcrypto: the OpenSSL library that Python's ssl module uses, called without a further dependency.

libcrypto           the loaded library
cipher_functions    addresses of its functions for the compiled loops, which encrypt connections
seal, unseal        one short message, encrypted and authenticated by AES-256-GCM

sources: AES-GCM (Dworkin 2007, NIST SP 800-38D); ChaCha20-Poly1305 (Nir & Langley 2018, RFC 8439)
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from gossamer.base import system
from gossamer.errors import ConnectError, MalformedError

AES, CHACHA = "AES-256-GCM", "ChaCha20-Poly1305"
CIPHERS = {AES: "EVP_aes_256_gcm", CHACHA: "EVP_chacha20_poly1305"}
KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16

# CipherFunctions in kernels-src/mesh_sealing.hpp, without the cipher, which comes last
FUNCTIONS = (
    "EVP_CIPHER_CTX_new",
    "EVP_CIPHER_CTX_free",
    "EVP_EncryptInit_ex",
    "EVP_EncryptUpdate",
    "EVP_EncryptFinal_ex",
    "EVP_DecryptInit_ex",
    "EVP_DecryptUpdate",
    "EVP_DecryptFinal_ex",
    "EVP_CIPHER_CTX_ctrl",
)
_GET_TAG, _SET_TAG = 0x10, 0x11  # EVP_CTRL_AEAD_GET_TAG and EVP_CTRL_AEAD_SET_TAG


@cache
def libcrypto() -> ctypes.CDLL:
    """Load the libcrypto that Python's ssl module uses. Raises ConnectError if none is accessible.

    Tried in this order: the library that `_ssl` and `_hashlib` are linked with; the program itself, if OpenSSL is
    linked statically; and the system's library of that name, if Python hides its own.
    """
    for name in _candidates():
        try:
            found = ctypes.CDLL(name)
            if all(hasattr(found, each) for each in (*FUNCTIONS, *CIPHERS.values())):
                return found
        except OSError:
            continue
    raise ConnectError(
        "Gossamer cannot encrypt, because it cannot call this Python's OpenSSL, which is hidden. --tls, --relay, "
        "join links and runs on several machines need it. Use a Python with OpenSSL as a shared library (the "
        "system's, conda's, pyenv's), or install libcrypto.so.3. On a trusted network, omit these options, join with "
        "--join HOST:PORT, and write --private-network or --plaintext at the first launcher; with --nnodes, on all."
    )


def _candidates() -> Iterator[str | None]:
    for name in ("_ssl", "_hashlib"):
        if file := getattr(importlib.import_module(name), "__file__", None):
            yield file  # dlsym also searches the libraries that a library is linked with
    yield None
    yield system.LIBCRYPTO


@cache
def cipher_functions(cipher: str) -> ctypes.Array[ctypes.c_void_p]:
    """Addresses of the functions that kernels-src/mesh_sealing.hpp calls. Raises ConnectError without a libcrypto."""
    library = libcrypto()
    found = [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in (*FUNCTIONS, CIPHERS[cipher])]
    return (ctypes.c_void_p * len(found))(*[each.value for each in found])


def seal(key: bytes, nonce: bytes, content: bytes) -> bytes:
    """Encrypt and authenticate a message.

    Args:
        key: 32 bytes.
        nonce: 12 bytes, never repeated with this key.
        content: The message.

    Returns:
        The ciphertext and, at its end, a tag of 16 bytes.

    Raises:
        ConnectError: No libcrypto is accessible.
    """
    out, tag, count = ctypes.create_string_buffer(len(content)), ctypes.create_string_buffer(TAG_BYTES), ctypes.c_int()
    with _context(key, nonce) as (library, context):
        _require(library.EVP_EncryptInit_ex(context, library.EVP_aes_256_gcm(), None, key, nonce))
        _require(library.EVP_EncryptUpdate(context, out, ctypes.byref(count), content, len(content)))
        _require(library.EVP_EncryptFinal_ex(context, tag, ctypes.byref(count)))  # GCM writes nothing here
        _require(library.EVP_CIPHER_CTX_ctrl(context, _GET_TAG, TAG_BYTES, tag))
    return out.raw + tag.raw


def unseal(key: bytes, nonce: bytes, sealed: bytes) -> bytes:
    """Return the content of a message that `seal` made with this key and nonce.

    Raises:
        MalformedError: It was made with another key or nonce, or was changed.
        ConnectError: No libcrypto is accessible.
    """
    body, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
    if len(tag) != TAG_BYTES:
        raise MalformedError(f"an encrypted message has at least {TAG_BYTES} bytes, got {len(sealed)}")
    out, end, count = ctypes.create_string_buffer(len(body)), ctypes.create_string_buffer(TAG_BYTES), ctypes.c_int()
    with _context(key, nonce) as (library, context):
        _require(library.EVP_DecryptInit_ex(context, library.EVP_aes_256_gcm(), None, key, nonce))
        _require(library.EVP_DecryptUpdate(context, out, ctypes.byref(count), body, len(body)))
        _require(library.EVP_CIPHER_CTX_ctrl(context, _SET_TAG, TAG_BYTES, tag))
        if library.EVP_DecryptFinal_ex(context, end, ctypes.byref(count)) != 1:
            raise MalformedError("an encrypted message was changed on its way, or encrypted with another key")
    return out.raw


@contextmanager
def _context(key: bytes, nonce: bytes) -> Iterator[tuple[ctypes.CDLL, ctypes.c_void_p]]:
    if len(key) != KEY_BYTES or len(nonce) != NONCE_BYTES:
        raise ValueError(f"need {KEY_BYTES} bytes of key and {NONCE_BYTES} of nonce, got {len(key)} and {len(nonce)}")
    library = _typed()
    context = ctypes.c_void_p(library.EVP_CIPHER_CTX_new())
    try:
        yield library, context
    finally:
        library.EVP_CIPHER_CTX_free(context)


def _require(result: int) -> None:
    if result != 1:
        raise ConnectError(f"this Python's OpenSSL does not encrypt with {AES}")


@cache
def _typed() -> ctypes.CDLL:
    """libcrypto with the types of the functions that `seal` and `unseal` call."""
    library = libcrypto()
    pointer, number, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    for way in ("Encrypt", "Decrypt"):
        getattr(library, f"EVP_{way}Init_ex").argtypes = (pointer, pointer, pointer, text, text)
        getattr(library, f"EVP_{way}Update").argtypes = (pointer, text, ctypes.POINTER(number), text, number)
        getattr(library, f"EVP_{way}Final_ex").argtypes = (pointer, text, ctypes.POINTER(number))
    library.EVP_CIPHER_CTX_ctrl.argtypes = (pointer, number, number, text)
    library.EVP_CIPHER_CTX_free.argtypes, library.EVP_CIPHER_CTX_free.restype = (pointer,), None
    for name in ("EVP_CIPHER_CTX_new", CIPHERS[AES]):
        getattr(library, name).restype = pointer
    return library
