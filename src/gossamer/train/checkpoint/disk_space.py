"""Disk space: lists the folders to remove after a checkpoint could not be written."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)


def room_text(directory: str | os.PathLike[str], error: OSError) -> str:
    """The remedy for a write error; on a full disk it lists the folders in `directory` and their sizes."""
    if error.errno not in FULL:
        return "Free some space or choose another directory, and save again."
    here = Path(directory)
    sizes = sorted(((_nbytes(path), path.name) for path in _folders(here)), reverse=True)
    held = ", ".join(f"{name} has {nbytes:,} bytes" for nbytes, name in sizes if nbytes)
    runs = any(name.startswith("run-") for _, name in sizes)
    advice = "Remove the folders that you do not need" + (": those named run-... are of other runs" if runs else "")
    return (
        f"{_free(here)}In {here}: {held or 'nothing to remove'}. {advice}, keep fewer checkpoints "
        "(session.save(directory, keep=2)), or choose another directory, and save again."
    )


def _free(here: Path) -> str:
    for place in (here, *here.absolute().parents):
        try:
            return f"{shutil.disk_usage(place).free:,} bytes are free there. "
        except FileNotFoundError:  # nothing was saved yet
            continue
        except OSError:
            break
    return ""


def _folders(here: Path) -> list[Path]:
    try:
        return [path for path in here.iterdir() if path.is_dir() and path.name.startswith(("step-", "run-"))]
    except OSError:
        return []


def _nbytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:  # removed by another rank
                continue
    return total
