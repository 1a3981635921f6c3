"""Federation identity: what makes two starts of a server the same federation, kept beside the journal of its rounds.

DIRECTORY/federation.json   its name, recipe and model
DIRECTORY/enrollment.json   which device has which number
DIRECTORY/rounds.jsonl      a line for each round
DIRECTORY/rounds/           the journal of its rounds
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from gossamer.errors import CheckpointError
from gossamer.federated.deployment.files import replace_file


class FederationIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two starts of a server the same federation."""

    federation: str
    recipe: str
    clients: int
    seed: int
    layout: str


def same_federation(directory: Path, identity: FederationIdentity) -> FederationIdentity:
    """The identity of the federation in a folder, which is this one's where there was none.

    Raises CheckpointError, with both values, where another federation lies there.
    """
    path = directory / "federation.json"
    if not path.is_file():
        replace_file(path, msgspec.json.encode(identity).decode())
        return identity
    try:
        found = msgspec.json.decode(path.read_bytes(), type=FederationIdentity)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Begin anew with another --journal") from error
    for key in ("recipe", "clients", "seed", "layout"):
        there, here = getattr(found, key), getattr(identity, key)
        if there != here:
            raise CheckpointError(
                f"{directory} holds another federation, of {key} {there!r} and not {here!r}, so going on from it would "
                "mix both. Name another folder: --journal OTHER; or start the server as it was started before"
            )
    return found
