"""Fingerprints: compare a newcomer with the run, key by key, before it is taken in."""

from __future__ import annotations

from gossamer.base.json_text import read_json
from gossamer.errors import MalformedError

MOST_VALUE_CHARACTERS = 200


def read_fingerprint(text: str) -> dict[str, str]:
    """Read a JSON object of texts. Raises MalformedError for anything else."""
    try:
        read = read_json(text)
    except ValueError as error:
        raise MalformedError(f"a fingerprint is a JSON object of texts, and this is no JSON: {error!s:.100}") from None
    if not isinstance(read, dict) or not all(isinstance(value, str) for value in read.values()):
        raise MalformedError("a fingerprint is a JSON object of texts: give json.dumps({'torch': torch.__version__})")
    return read


def difference(run: str, newcomer: str) -> str:
    """What a newcomer must hear that is not as the run's members are, both values named; empty where it is.

    Raises MalformedError for a fingerprint that is none.
    """
    ours, theirs = read_fingerprint(run), read_fingerprint(newcomer)
    differing = [key for key in dict.fromkeys((*ours, *theirs)) if ours.get(key) != theirs.get(key)]
    if not differing:
        return ""
    named = "; in ".join(
        f"{key}: {_shown(ours.get(key))} in the run, {_shown(theirs.get(key))} here" for key in differing
    )
    return (
        "this worker is not like those that train already, so its parameters would drift away from theirs without a "
        f"word, and it was not taken in. They differ in {named}. Make these alike and start this worker again."
    )


def _shown(value: str | None) -> str:
    return "none" if value is None else repr(value[:MOST_VALUE_CHARACTERS])
