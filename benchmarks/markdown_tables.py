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


def named_rows(text: str, names: int = 0) -> dict[str, Cells]:
    """Rows of all tables of a Markdown text.

    Args:
        text: Markdown.
        names: columns at the left that name a row; 0 for those before the first one that is aligned to the right.

    Returns:
        Cells by column, for each row. A row has the name "heading | first cells". The name of a row that begins with
        "..." includes that of the last row that does not.
    """
    found: dict[str, Cells] = {}
    heading, head, named, above = "", list[str](), names, ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip()[1:-1].split("|")] if line.startswith("|") else []
        if line.startswith("#"):
            heading = line.strip("# ")
        if not cells:
            head = []
        elif not head:
            head = cells
        elif set(line) <= set("|-: "):
            named = names or next((place for place, cell in enumerate(cells) if cell.endswith(":")), 1)
        else:
            name = " | ".join(filter(None, [heading, *cells[:named]]))
            above = above if cells[0].startswith("...") else name
            found[name if name == above else f"{above} {cells[0]}"] = dict(zip(head, cells, strict=True))
    return found


def loss(cell: str) -> Loss:
    """Of "1.874 ± 0.008", or of what diverged."""
    numbers = [float(each) for each in NUMBER.findall(cell)]
    if cell.startswith("diverged"):
        return Loss(inf, 0.0)
    return Loss(numbers[0], numbers[1] if "±" in cell else 0.0)
