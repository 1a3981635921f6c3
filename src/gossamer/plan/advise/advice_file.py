"""Advice file: a whole advice as versioned JSON. Lengths and types are validated when it is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from gossamer.base import bounded_file
from gossamer.base.json_text import DEEPEST_LEVELS, nesting
from gossamer.errors import GossamerError
from gossamer.version import __version__

ADVICE_VERSION = 1
MOST_POINTS = 240  # of a curve, the resolution of a picture
MOST_ROWS = 10_000

MOST_CHARACTERS = 20_000  # of a text

Text = Annotated[str, msgspec.Meta(max_length=MOST_CHARACTERS)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Range = tuple[float | None, float | None, float | None]  # value, low, high; None if unknown
Pairs = Annotated[tuple[tuple[float, float, float], ...], msgspec.Meta(max_length=MOST_POINTS)]


class AdviceError(GossamerError, ValueError):
    """The file is not an advice, or has an unknown version."""


def written(text: str) -> str:
    """A text that an advice may contain: the beginning of a long one, and bytes of file names that are not UTF-8 in
    escapes."""
    return text[:MOST_CHARACTERS].encode("utf-8", "backslashreplace").decode()[:MOST_CHARACTERS]


def candidate_name(recipe: str, learning_rate_factor: float) -> str:
    """Name of a candidate: its recipe, and the factor of its learning rate unless that is 1."""
    return recipe if learning_rate_factor == 1 else f"{recipe}, learning rate x {learning_rate_factor:g}"


@dataclass(frozen=True, kw_only=True)
class CandidateRow:
    """A candidate recipe, its estimated step, and the reason if it was excluded."""

    recipe: Text
    step_seconds: Amount = 0.0
    bytes_sent: Amount = 0.0
    memory_bytes: Count = 0
    expected_steps: Amount = 1.0
    step_seconds_low: float | None = None  # if estimates have intervals
    step_seconds_high: float | None = None
    excluded: Text | None = None


@dataclass(frozen=True, kw_only=True)
class ContenderRow:
    """A recipe in the race. curve: (step, virtual seconds, value), thinned. out: why it was eliminated."""

    recipe: Text
    learning_rate_factor: Amount = 1.0
    steps: Count
    seconds: Amount
    bytes_sent: Amount
    loss: float | None = None  # mean of the last quarter of the race
    curve: Pairs = ()
    out: Text | None = None
    speedup: Range | None = None
    loss_at_equal_steps: Range | None = None
    loss_at_equal_seconds: Range | None = None
    seconds_to_target: float | None = None

    @property
    def name(self) -> str:
        return candidate_name(self.recipe, self.learning_rate_factor)


@dataclass(frozen=True, kw_only=True)
class FindingRow:
    """Whether a family of recipes suits the gradients, and why."""

    family: Text
    works: bool
    because: Text


@dataclass(frozen=True, kw_only=True)
class RungRow:
    """A round of the race: its virtual second, its recipes, and the eliminated ones."""

    seconds: Amount
    names: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MOST_ROWS)]
    out: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MOST_ROWS)]


@dataclass(frozen=True, kw_only=True)
class ConfirmedRow:
    """A recipe with a real run: estimated and measured step times."""

    recipe: Text
    estimated_step_seconds: float | None
    measured_step_seconds: Amount
    steps: Count
    loss: float | None  # at equal time
    seconds_to_target: float | None = None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """recipe: the recommended one, Dense() if no change is recommended. Lists: baseline first, then the best."""

    advice_version: Count = ADVICE_VERSION
    gossamer: Text = __version__
    recipe: Text
    learning_rate_factor: Amount = 1.0
    change: bool
    use: Text
    gain: Text
    cost: Text
    command: Text
    script: Text
    arguments: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MOST_ROWS)] = ()
    workers: Count
    network: Text
    speeds: Annotated[tuple[Amount, ...], msgspec.Meta(max_length=MOST_ROWS)] = ()  # of the workers; empty: equal
    target: Text | None = None
    compute_seconds: Amount = 0.0
    metric: Text
    race_seconds: Amount  # virtual
    confidence: Amount
    candidates: Annotated[tuple[CandidateRow, ...], msgspec.Meta(max_length=MOST_ROWS)] = ()
    contenders: Annotated[tuple[ContenderRow, ...], msgspec.Meta(max_length=MOST_ROWS)] = ()
    rungs: Annotated[tuple[RungRow, ...], msgspec.Meta(max_length=MOST_ROWS)] = ()
    would_change: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MOST_ROWS)] = ()
    remarks: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MOST_ROWS)] = ()
    gradients: dict[Text, float | None] = field(default_factory=dict)  # statistics by name
    findings: Annotated[tuple[FindingRow, ...], msgspec.Meta(max_length=MOST_ROWS)] = ()
    confirmed: Annotated[tuple[ConfirmedRow, ...], msgspec.Meta(max_length=MOST_ROWS)] = ()


def write_advice(file: Path, advice: Advice) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(advice), indent=1) + b"\n")


def read_advice(file: Path) -> Advice:
    """Read and validate an advice. Raises AdviceError with the invalid part."""
    try:
        text = bounded_file.read_text(file)
        if nesting(text) > DEEPEST_LEVELS:
            raise ValueError("it nests too deeply")
        advice = msgspec.json.decode(text, type=Advice)
    except (OSError, ValueError) as problem:  # including msgspec's errors
        raise AdviceError(f"{file} cannot be read as an advice: {problem}") from None
    if advice.advice_version != ADVICE_VERSION:
        raise AdviceError(
            f"{file} is an advice of version {advice.advice_version}, and this version of Gossamer reads "
            f"{ADVICE_VERSION}. Create it again: gossamer advise"
        )
    return advice
