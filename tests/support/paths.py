"""Paths: where the project's folders are, wherever a test file lies."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
EXAMPLES = ROOT / "examples"
BENCHMARKS = ROOT / "benchmarks"
SUPPORT = TESTS / "support"
