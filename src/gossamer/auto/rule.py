"""Rule: the numbers by which recipes are changed, and what is remembered from look to look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gossamer.auto import loss_guard
from gossamer.auto.network_fit import Chooser, Equation, FittedLine, waited_least


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When to change. Shares are of seconds to a loss."""

    worth: float = 0.15  # that a stronger rung must save
    close: float = 0.10  # within which of the best one a weaker rung is as good
    looks: int = 3  # in a row that say the same
    first_looks: int = 1  # likewise, before the first change: for what is in force then nothing was said
    dwell_steps: int = 100  # between two changes, at least
    most_doublings: int = 4  # of the dwell
    surprise: float = 3.0  # times what was foretold, at which nothing is waited for
    least_look_steps: int = 2
    settling_steps: int = 5  # until the first look after a change
    look_seconds: float = 1.0  # from one look to the next, if that is not too few steps or too many
    look_share: float = 0.005  # of all seconds, that looks may take
    believed: Chooser = waited_least


@dataclass(frozen=True, kw_only=True)
class RuleState:
    """What the rule remembers from look to look; the same on all ranks."""

    rung: int = 0  # its place on the ladder
    next_look: int = 3  # the step after which ranks look
    changed_at: int | None = None  # the step of the last change
    went: int = 0  # its direction: 1 to a stronger rung, -1 to a weaker
    doublings: int = 0  # of the dwell
    surprised_at: int | None = None  # the last step at which nothing was waited for
    votes: int = 0  # looks in a row, below 0 for weaker rungs
    foretold: float | None = None  # seconds of a step here
    line: FittedLine | None = None
    equation: Equation | None = None  # of the last look
    codec_seconds: Mapping[str, float] = field(default_factory=dict)  # of a step, by the names of rungs that were tried
    norms: loss_guard.Norms = ()
    learning_rate: float | None = None
    closed_from: int | None = None  # rungs from here on are closed,
    closed_until: int = 0  # up to this step

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint: a run that goes on from it decides as this one would."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> RuleState:
        line, equation = fields["line"], fields["equation"]
        return cls(
            **{
                **fields,
                "line": None if line is None else FittedLine(**line),
                "equation": None if equation is None else Equation(**equation),
                "codec_seconds": dict(fields["codec_seconds"]),
                "norms": tuple((step, norm) for step, norm in fields["norms"]),
            }
        )
