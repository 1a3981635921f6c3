"""What peers that come and go write on a wire: frames, a handshake, words. No sockets, no threads, no clock."""

try:
    import msgspec as msgspec
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "Peers that come and go write their words with msgspec, which is not installed: pip install 'gossamer[wire]'."
    ) from None
