"""Rule: parameters and state of the rule by which recipes are changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gossamer.train.auto import loss_guard
from gossamer.train.auto.network_fit import Chooser, Equation, Factors, FittedLine, waited_least


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Parameters. Shares are of seconds to a loss."""

    worth: float = 0.15  # minimum saving of a stronger rung
    close: float = 0.10  # maximum distance to the best rung at which a weaker one is preferred
    change_steps: float = 5.0  # cost of a change in steps of the new rung,
    change_means: float = 1.0  # and in dense means, if workers trained separately
    most_doublings: int = 6  # of that cost
    rest: float = 128.0  # multiple of the (doubled) change_steps after which the cost is reset
    least_look_steps: int = 2
    settling_steps: int = 5  # until the first look after a change
    look_seconds: float = 0.1  # between two looks, within the limits on steps
    look_share: float = 0.005  # maximum share of looks in the total time
    soon_share: float = 0.02  # the same after a change
    closed_steps: int = 1000  # for which a rung is closed after its residuals were too large
    believed: Chooser = waited_least


@dataclass(frozen=True, kw_only=True)
class RuleState:
    """State of the rule between looks; the same on all ranks."""

    rung: int = 0  # index on the ladder
    next_look: int = 3  # the step after which ranks look
    looked_at: int = 0  # the step of the last look
    rest_seconds: float = 0.0  # after a look, before a slow step may request another one
    usual_step: float | None = None  # seconds at that look; None if not known for this rung, or with local steps
    changed_at: int | None = None  # the step of the last change
    doublings: int = 0  # of the cost of a change
    lost: tuple[float, ...] = ()  # seconds that staying has lost to each rung since the last change, at least 0
    line: FittedLine | None = None  # None: nothing was measured yet
    equation: Equation | None = None  # of the last look
    codec_seconds: Mapping[str, float] = field(default_factory=dict)  # of a step, by name, of rungs that were tried
    factors: Factors = field(default_factory=dict)  # for the wire time, by name, of rungs that were tried
    norms: loss_guard.Norms = ()
    learning_rate: float | None = None
    closed_from: int | None = None  # rungs from this index on are closed,
    closed_until: int = 0  # up to this step

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint: a resumed run makes the same decisions."""
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
