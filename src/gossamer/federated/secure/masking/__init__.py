"""Masking: what masks are made of, and the numbers that they hide.

ring         integers that no sum can leave, and their bytes
masks        adds and takes away streams of uniform numbers
shamir       secrets in shares
primitives   X25519, HKDF, ChaCha20, of the package `cryptography`
"""
