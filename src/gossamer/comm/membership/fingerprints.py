"""Fingerprints: compare a newcomer with the running workers, key by key, before it is admitted."""

from __future__ import annotations

from gossamer.base.json_text import read_json
from gossamer.errors import MalformedError

MOST_VALUE_CHARACTERS = 200


def read_fingerprint(text: str) -> dict[str, str]:
    """Parse a JSON object of strings. Raises MalformedError for anything else."""
    try:
        read = read_json(text)
    except ValueError as error:
        raise MalformedError(f"a fingerprint must be a JSON object of strings: invalid JSON ({error!s:.100})") from None
    if not isinstance(read, dict) or not all(isinstance(value, str) for value in read.values()):
        raise MalformedError("a fingerprint must be a JSON object of strings: json.dumps({'torch': torch.__version__})")
    return read


def difference(run: str, newcomer: str) -> str:
    """Describe how a newcomer's fingerprint differs from the run's; empty if they are equal.

    Raises MalformedError for an invalid fingerprint.
    """
    expected, proposed = read_fingerprint(run), read_fingerprint(newcomer)
    differing = [key for key in dict.fromkeys((*expected, *proposed)) if expected.get(key) != proposed.get(key)]
    if not differing:
        return ""
    named = "; in ".join(
        f"{key}: {_shown(expected.get(key))} in the run, {_shown(proposed.get(key))} here" for key in differing
    )
    return (
        "this worker differs from the running workers, so its parameters would silently diverge. It was not admitted. "
        f"Differences: {named}. Align them, then restart this worker."
    )


def _shown(value: str | None) -> str:
    return "none" if value is None else repr(value[:MOST_VALUE_CHARACTERS])
