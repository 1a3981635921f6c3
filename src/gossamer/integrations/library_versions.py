"""Library versions: rejects a library that is missing or older than the versions tested with its adapter."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

_LEADING_NUMBER = re.compile(r"[0-9]+")


class LibraryVersionError(ImportError):
    """A library that an adapter needs is missing or too old. The message contains the command that installs it."""


def _numbers(text: str) -> tuple[int, ...]:
    """The release numbers of a version, such as (2, 4, 0) of "2.4.0rc1"."""
    found = (_LEADING_NUMBER.match(part) for part in text.split("."))
    return tuple(int(number.group()) for number in found if number)


def require_library(name: str, floor: str, *, extra: str) -> None:
    """Raise LibraryVersionError unless the distribution `name` is installed, in version `floor` or newer.

    extra: the name of Gossamer's optional dependencies that install it.
    """
    remedy = f"Write pip install 'gossamer[{extra}]', or pip install '{name}>={floor}'."
    try:
        found = version(name)
    except PackageNotFoundError:
        raise LibraryVersionError(
            f"gossamer.integrations.{extra} adapts {name}, which is not installed. {remedy}"
        ) from None
    if _numbers(found) < _numbers(floor):
        raise LibraryVersionError(
            f"{name} {found} is installed, and gossamer.integrations.{extra} was tested with {floor} and newer: older "
            f"ones call their plugins otherwise. {remedy}"
        )
