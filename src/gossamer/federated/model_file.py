"""Model file: a model's state on disk, as torch.save writes it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn


def save_model(model: nn.Module, path: Path) -> str:
    """Write the model's state_dict in the place of what was there; returns the line that loads it. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            torch.save(model.state_dict(), file)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return f"model.load_state_dict(torch.load({str(path)!r}, weights_only=True))"
