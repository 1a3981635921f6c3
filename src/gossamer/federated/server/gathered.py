"""Gathered: how many are here of what rounds wait for, while nobody trains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gathered:
    """Too few of them, where `here` is below `wanted`."""

    here: int
    wanted: int
    of: str
    then: str  # what is done with fewer, after a while

    @classmethod
    def devices(cls, here: int, wanted: int) -> Gathered:
        return cls(here, wanted, "devices that a round begins with", "it begins with")

    @classmethod
    def reports(cls, here: int, wanted: int) -> Gathered:
        return cls(here, wanted, "reports that a version is made of", "it is made of")
