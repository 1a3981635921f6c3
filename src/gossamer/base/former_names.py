"""Former names of public objects: each warns with the new name. docs/reference/deprecations.md has the policy."""

from __future__ import annotations

import warnings
from typing import Any


def warn_former_name(old: str, write: str, stacklevel: int = 1) -> None:
    """Warn that `old` has a new name.

    Args:
        old: the former name, such as "session.merged".
        write: the code to write instead, such as "session.averaged_parameters".
        stacklevel: frames between the function that uses the former name and the caller of this function, at least 1.
    """
    message = f"{old} has a new name and will be removed. Write {write}."
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel + 2)


def former_attribute(owner: str, old: str, new: str) -> property:
    """An attribute by its former name, which warns. owner: the name of an instance in messages, such as "session"."""

    def get(self: Any) -> Any:
        warn_former_name(f"{owner}.{old}", f"{owner}.{new}")
        return getattr(self, new)

    return property(get, doc=f"The former name of `{new}`.")
