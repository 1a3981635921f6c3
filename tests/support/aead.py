"""AES-GCM without Gossamer: by the package `cryptography` where it is installed, else by the libcrypto of ssl."""

from __future__ import annotations

import _ssl
import ctypes


def aes_gcm_opened(key: bytes, nonce: bytes, sealed: bytes) -> bytes | None:
    """What was sealed, its tag at the end; None where it does not open."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        return _by_libcrypto(key, nonce, sealed)
    try:
        return bytes(AESGCM(key).decrypt(nonce, sealed, None))
    except InvalidTag:
        return None


def _by_libcrypto(key: bytes, nonce: bytes, sealed: bytes) -> bytes | None:
    crypto = ctypes.CDLL(getattr(_ssl, "__file__", None))
    pointer, count = ctypes.c_void_p, ctypes.c_int()
    for name in ("EVP_CIPHER_CTX_new", "EVP_aes_256_gcm"):
        getattr(crypto, name).restype = pointer
    context = pointer(crypto.EVP_CIPHER_CTX_new())
    plain = ctypes.create_string_buffer(len(sealed))
    try:
        assert crypto.EVP_DecryptInit_ex(context, pointer(crypto.EVP_aes_256_gcm()), None, key, nonce)
        assert crypto.EVP_DecryptUpdate(context, plain, ctypes.byref(count), sealed[:-16], len(sealed) - 16)
        assert crypto.EVP_CIPHER_CTX_ctrl(context, 0x11, 16, sealed[-16:])
        opened = crypto.EVP_DecryptFinal_ex(context, plain, ctypes.byref(count)) == 1
    finally:
        crypto.EVP_CIPHER_CTX_free(context)
    return plain.raw[:-16] if opened else None
