"""Page loops: the Python blocks of docs/how-to/loops.md and loops-advanced.md, run alone or by each of several workers.

python page_loops.py DIRECTORY runs all of them in turn and prints a digest of what each ended with.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.paths import ROOT

from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.train.checkpoint import digest

HOW_TO = ROOT / "docs" / "how-to"
PAGES = [HOW_TO / "loops.md", HOW_TO / "loops-advanced.md"]  # the first has the common setup


class Loop(NamedTuple):
    """A block of the page, under its heading."""

    title: str
    code: str


def read_loops(page: str) -> tuple[str, list[Loop]]:
    """The lines that every loop stands after, and the loops."""
    found = [
        Loop(section.partition("\n")[0].strip(), code)
        for section in re.split(r"^#+ ", page, flags=re.MULTILINE)
        for code in re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    ]
    return found[0].code, found[1:]


def read_diff(page: str) -> tuple[Loop, Loop]:
    """The loop before and after the changes that the README shows, with what it takes for granted."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    given = "Model, criterion, epochs = lambda: nn.Linear(8, 3), cross_entropy, 2\n"
    before, after = (
        "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith(dropped)) for dropped in "+-"
    )
    # Lines that are in both versions stand as deep as in the later one
    return Loop("README, before", given + _dedented(before)), Loop("README", given + after)


def _dedented(code: str) -> str:
    """A loop whose body stands two levels deep below one `for`."""
    return code.replace("\n        for", "\n    for").replace("\n            ", "\n        ")


BEFORE, LOOPS = read_loops("".join(page.read_text(encoding="utf-8") for page in PAGES))
WITHOUT, WITH = read_diff((ROOT / "README.md").read_text(encoding="utf-8"))


def run_loop(loop: Loop) -> dict[str, Any]:
    """Run it after the page's first lines; returns its names. Whatever it leaves attached is closed."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "loop"}
    try:
        exec(compile(f"{BEFORE}\n{loop.code}", loop.title, "exec"), names)
        assert open_sessions() == [], f"{loop.title} leaves a session open"
    finally:
        for session in open_sessions():
            session.close()
    return names


def ending(names: dict[str, Any]) -> str:
    """A digest of what the workers hold alike: counts where a loop counts, else all parameters."""
    return digest([torch.tensor(list(names["counts"].values()))] if "counts" in names else list(_parameters(names)))


def _parameters(names: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in names.values():
        if isinstance(value, torch.nn.Module):
            yield from value.parameters()


def main(directory: str) -> None:
    for number, loop in enumerate((*LOOPS, WITH)):
        folder = Path(directory, str(number))
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        print(f"ended {loop.title}: {ending(run_loop(loop))}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
