"""When to talk."""

from gossamer.strategies.base import AGREED, AVERAGE, KEEP, RESET, Memory, Merging, Stage, Strategy
from gossamer.strategies.delayed import DelayedAveraging
from gossamer.strategies.every_step import EveryStep
from gossamer.strategies.local import LocalSGD, PostLocalSGD
from gossamer.strategies.outer import DiLoCo
from gossamer.strategies.schedule import Periodic, Turn

__all__ = [
    "AGREED",
    "AVERAGE",
    "KEEP",
    "RESET",
    "DelayedAveraging",
    "DiLoCo",
    "EveryStep",
    "LocalSGD",
    "Memory",
    "Merging",
    "Periodic",
    "PostLocalSGD",
    "Stage",
    "Strategy",
    "Turn",
]
