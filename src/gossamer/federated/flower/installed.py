"""Installed: imports Flower where it is asked for, and says which versions go."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from gossamer.errors import GossamerError

FLOOR = (1, 23)  # the oldest that the tests ran with
TESTED = "1.41.0"


class FlowerMissing(GossamerError, ImportError):
    """Flower is not installed, or is too old."""


def need_flower() -> None:
    """Raises FlowerMissing, with the line to write."""
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise FlowerMissing(
            "This needs Flower, which is not installed here. Write: pip install 'gossamer[flower]' (tested with flwr "
            f"{TESTED})"
        ) from None
    if parsed(found) < FLOOR:
        raise FlowerMissing(
            f"This needs flwr {'.'.join(map(str, FLOOR))} or newer, whose strategies exchange messages, and {found} is "
            f"installed. Write: pip install -U 'flwr=={TESTED}'"
        )
    import_module("flwr.serverapp.strategy")


def parsed(text: str) -> tuple[int, int]:
    """(1, 41) for "1.41.0"; (0, 0) for what is no version."""
    first, _, rest = text.partition(".")
    second = rest.partition(".")[0]
    return (int(first), int(second)) if first.isdecimal() and second.isdecimal() else (0, 0)
