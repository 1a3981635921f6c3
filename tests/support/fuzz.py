"""Fuzzing: random and damaged inputs for every reader of data from other processes, for as long as requested.

    cd tests; python -m support.fuzz --seconds 120 [TARGET ...]

A target has a strategy of hypothesis, and a check of one input. The check passes if the reader accepts the input or
raises its documented error; any other exception is a finding. Findings are reduced by hypothesis and stored in the
corpus, which each later call tries first. Targets: support/fuzz_targets.py.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

CORPUS = Path(__file__).resolve().parents[2] / "build" / "fuzz-corpus"
SHOWN = 6000  # characters of a finding
BATCH = 200  # inputs between looks at the clock
INTERESTING = [0, 1, 2, 7, 8, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1]


@dataclass(frozen=True)
class FuzzTarget:
    """inputs: makes an input. check: reads it; raises for a finding."""

    inputs: st.SearchStrategy[Any]
    check: Callable[[Any], None]


@st.composite
def damaged(draw: st.DrawFn, valid: st.SearchStrategy[bytes]) -> bytes:
    """A valid message with up to four changes: bits, numbers, cuts, repeated and inserted bytes."""
    data = bytearray(draw(valid))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["bit", "byte", "number", "cut", "end", "repeat", "insert"])):
            case "bit" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "byte" if data:
                data[at] = draw(st.integers(0, 255))
            case "number":
                size = draw(st.sampled_from([1, 2, 4, 8]))
                number = draw(st.sampled_from(INTERESTING)) % 2 ** (8 * size)
                data[at : at + size] = number.to_bytes(size, "little")
            case "cut":
                del data[at : at + draw(st.integers(1, 64))]
            case "end":
                del data[at:]
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 64))]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=16))
    return bytes(data)


@dataclass
class FuzzResult:
    """executions: checked inputs, those of the reduction of a finding included. finding: its traceback, or None."""

    executions: int
    finding: str | None


def run(target: FuzzTarget, corpus: Path, seconds: float, batch: int = BATCH) -> FuzzResult:
    """Check inputs for this time, or until a finding."""
    count, until = 0, time.monotonic() + seconds

    @settings(
        max_examples=batch,
        deadline=None,
        database=DirectoryBasedExampleDatabase(corpus),
        suppress_health_check=[*HealthCheck],
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
        print_blob=False,
    )
    @given(target.inputs)
    def one_batch(value: Any) -> None:
        nonlocal count
        count += 1
        target.check(value)

    while True:
        try:
            one_batch()
        except Exception:
            text = traceback.format_exc()
            return FuzzResult(count, text if len(text) <= SHOWN else f"{text[:SHOWN]} ... (the input is in the corpus)")
        if time.monotonic() >= until:
            return FuzzResult(count, None)


def main() -> int:
    from support.fuzz_targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="folder of findings")
    args = parser.parse_args()
    if unknown := [name for name in args.targets if name not in TARGETS]:
        parser.error(f"there is no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    findings = 0
    for name in args.targets or TARGETS:
        result = run(TARGETS[name](), args.corpus / name, args.seconds)
        findings += result.finding is not None
        end = "no finding" if result.finding is None else f"a finding\n{result.finding}"
        print(f"{name}: {result.executions:,} inputs, {end}", flush=True)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
