"""Files: writes small texts so that a file is the old one or the new one, whole, whenever a process ends."""

from __future__ import annotations

import os
from pathlib import Path

from gossamer.checkpoint.durable import make_folder, sync_folder, write_file
from gossamer.errors import CheckpointError


def replace_file(path: Path, text: str) -> None:
    """Raises CheckpointError where the disk is full; the file before stays."""
    part = path.with_name(f".{path.name}.part")
    try:
        make_folder(path.parent)
        write_file(part, [text.encode()])
        os.replace(part, path)
        sync_folder(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} cannot be written ({error}), so a restart would not know of it. Free some space"
        ) from error
