"""What goes wrong while a lab is built or changed."""

from __future__ import annotations
