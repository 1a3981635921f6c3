"""Rule: the numbers by which recipes are changed, and what is remembered from look to look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gossamer.train.auto import loss_guard
from gossamer.train.auto.network_fit import Chooser, Equation, Factors, FittedLine, waited_least


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When to change. Shares are of seconds to a loss."""

    worth: float = 0.15  # that a stronger rung must save
    close: float = 0.10  # within which of the best one a weaker rung is as good
    change_steps: float = 5.0  # of the rung that is changed to, whose seconds a change is taken to cost,
    change_means: float = 1.0  # and so many dense means, where workers trained apart
    most_doublings: int = 6  # of that cost
    rest: float = 128.0  # times change_steps, as doubled, after which the cost is single again
    least_look_steps: int = 2
    settling_steps: int = 5  # until the first look after a change
    look_seconds: float = 0.1  # from one look to the next, if that is not too few steps or too many
    look_share: float = 0.005  # of all seconds, that looks may take
    soon_share: float = 0.02  # likewise, while everything is new
    closed_steps: int = 1000  # for which a rung is closed where too much waited to be sent
    believed: Chooser = waited_least


@dataclass(frozen=True, kw_only=True)
class RuleState:
    """What the rule remembers from look to look; the same on all ranks."""

    rung: int = 0  # its place on the ladder
    next_look: int = 3  # the step after which ranks look
    looked_at: int = 0  # the step of the last look
    rest_seconds: float = 0.0  # after a look, before a slow step may ask for another
    usual_step: float | None = (
        None  # seconds at that look; None: of this rung nothing is known, or it is of local steps
    )
    changed_at: int | None = None  # the step of the last change
    doublings: int = 0  # of what a change is taken to cost
    lost: tuple[float, ...] = ()  # seconds that staying has lost to each rung since the last change, at least 0
    line: FittedLine | None = None  # None: nothing was measured yet
    equation: Equation | None = None  # of the last look
    codec_seconds: Mapping[str, float] = field(default_factory=dict)  # of a step, by the names of rungs that were tried
    factors: Factors = field(default_factory=dict)  # of the wire's seconds, likewise
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
                "lost": tuple(fields["lost"]),
                "factors": dict(fields["factors"]),
                "codec_seconds": dict(fields["codec_seconds"]),
                "norms": tuple((step, norm) for step, norm in fields["norms"]),
            }
        )
