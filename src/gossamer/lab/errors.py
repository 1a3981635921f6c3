"""What goes wrong while a lab is built or changed."""

from __future__ import annotations

from gossamer.errors import GossamerError


class LabError(GossamerError):
    """A network that this machine cannot emulate, or not in this way."""
