"""Server journal: keeps each version with its fates, and the tasks given since, from which a killed server goes on.

DIRECTORY/federation.json           what the federation is: its name, recipe, model
DIRECTORY/enrollment.json               which device has which number
DIRECTORY/version/step-00000003/    the model and the fates, as checkpoints are kept
DIRECTORY/tasks.json                who has a task since
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from gossamer import checkpoint
from gossamer.core.json_text import read_json
from gossamer.errors import CheckpointError
from gossamer.federated.deployment.files import replace_file
from gossamer.federated.server.rounds import Assignment, Rounds, RoundsJournal


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


class ServerJournal(RoundsJournal):
    """A version is on disk before any receipt of it is given, and a task before a device hears of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def begun(self, rounds: Rounds) -> None:
        tasks = {str(client): [given.round, given.version] for client, given in rounds.assigned.items()}
        about = {"version": rounds.model.version, "round": rounds.next_round, "tasks": tasks}
        replace_file(self._directory / "tasks.json", json.dumps(about))

    def committed(self, rounds: Rounds) -> None:
        fates = {str(client): list(fate) for client, fate in rounds.fates.items()}
        tree = {"model": rounds.model.state_dict(), "fates": fates, "round": rounds.next_round}
        folder, version = self._directory / "version", rounds.model.version
        try:
            folder.mkdir(parents=True, exist_ok=True)
            digest = checkpoint.stage(folder, version, 0, tree)
            checkpoint.complete(folder, version, 0, [digest], {}, keep=1)
        except OSError as error:
            raise CheckpointError(
                f"version {version} cannot be written to {folder} ({error}), so nobody was told of it. Free some "
                "space, and start the server again: it goes on from the version before"
            ) from error

    def restore(self, rounds: Rounds, moment: float) -> bool:
        """Put rounds that begin back to where they were; False where nothing was kept. Raises CheckpointError."""
        folder = self._directory / "version"
        versions = checkpoint.complete_steps(folder, 0) if folder.is_dir() else []
        if versions:
            tree, _ = checkpoint.read(folder, versions[-1], 0)
            rounds.model.load_state_dict(tree["model"])
            rounds.fates = {int(client): (int(fate[0]), int(fate[1])) for client, fate in tree["fates"].items()}
            rounds.next_round = int(tree["round"])
        path = self._directory / "tasks.json"
        if path.is_file():
            about = read_json(path.read_bytes())
            if about["version"] == rounds.model.version:
                rounds.next_round = int(about["round"])
                rounds.assigned = {
                    int(client): Assignment(int(given[0]), int(given[1]), moment)
                    for client, given in about["tasks"].items()
                }
        return bool(versions or rounds.assigned)
