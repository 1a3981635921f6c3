"""Page writer: fills docs/benchmarks/compressors.md with measured speeds.

    python benchmarks/page.py --speed FILE.json [--quick]

--quick writes a copy of the page in runs/quick. FILE.json is what `gossamer bench compressors --json FILE.json` wrote.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import ROOT, provenance, scratch  # found only after the line above

from gossamer.plan.bench import ABOUT, BenchmarkResult, cells, remarks

PAGE = ROOT / "docs" / "benchmarks" / "compressors.md"


def put_between(page: Path, what: str, text: str) -> None:
    """Replace what stands between the page's markers."""
    before, after = around(page, what)
    page.write_text(f"{before}\n\n{text}\n\n{after}", encoding="utf-8")


def between(page: Path, what: str) -> str:
    """What stands between the page's markers."""
    before, after = around(page, what)
    return page.read_text(encoding="utf-8").removeprefix(before).removesuffix(after)


def around(page: Path, what: str) -> tuple[str, str]:
    """The page until and from the markers, these included."""
    begin, end = f"<!-- written by a program: {what} -->", f"<!-- end: {what} -->"
    before, found, rest = (page.read_text(encoding="utf-8") if page.exists() else "").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        sys.exit(f"{page} has no lines {begin} and {end}, so there is no place for the text. Add them.")
    return before + begin, end + after


def speeds(record: dict[str, Any]) -> str:
    """What `gossamer bench compressors` measured, as a table."""
    measured = [BenchmarkResult(**{**one, "seconds": tuple(one["seconds"])}) for one in record["measured"]]
    notes = [f"- {sentence}" for sentence in remarks(measured)]
    return "\n".join([provenance(shlex.split(record["command"])), "", ABOUT, "", *_table(cells(measured)), "", *notes])


def _table(lines: Sequence[dict[str, str]]) -> Iterator[str]:
    yield f"| {' | '.join(name.strip() for name in lines[0])} |"
    yield f"|---|---|{'---:|' * (len(lines[0]) - 2)}"
    for line in lines:
        yield f"| {' | '.join(line.values())} |"


def main(args: argparse.Namespace) -> None:
    page = scratch(PAGE) if args.quick else PAGE
    put_between(page, "speed", speeds(json.loads(args.speed.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write what docs/benchmarks/compressors.md lists.")
    parser.add_argument(
        "--speed", type=Path, required=True, metavar="FILE.json", help="what gossamer bench compressors wrote"
    )
    parser.add_argument("--quick", action="store_true", help="write a copy of the page, to see that it runs")
    main(parser.parse_args())
