"""When to talk."""

from gossamer.strategies.base import Strategy
from gossamer.strategies.every_step import EveryStep

__all__ = ["EveryStep", "Strategy"]
