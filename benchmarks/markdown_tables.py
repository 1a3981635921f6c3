"""Tables of pages, read back: a picture is drawn from what its page says, also when the runs are gone."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

Cells = dict[str, str]  # by column
NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+")


@dataclass(frozen=True)
class Loss:
    """A mean over seeds and its standard deviation; inf where a training diverged, 0 where one seed has no spread."""

    mean: float
    spread: float


def sections(text: str) -> dict[str, str]:
    """What stands below each heading of the third level, by the heading; what stands before the first, by ""."""
    found, name = {"": ""}, ""
    for line in text.splitlines(keepends=True):
        if line.startswith("### "):
            name = line.removeprefix("### ").strip()
            found[name] = ""
        else:
            found[name] += line
    return found


def rows(text: str) -> Iterator[Cells]:
    """The lines of all tables in a text."""
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
        elif not set(line) <= set("|-: "):
            yield dict(zip(header, cells, strict=True))


def loss(cell: str) -> Loss:
    """Of "1.874 ± 0.008", or of what diverged."""
    numbers = [float(each) for each in NUMBER.findall(cell)]
    if cell.startswith("diverged"):
        return Loss(inf, 0.0)
    return Loss(numbers[0], numbers[1] if "±" in cell else 0.0)
