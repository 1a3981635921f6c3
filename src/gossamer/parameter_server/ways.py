"""By what gradients travel to the servers, and parameters back."""

from __future__ import annotations
