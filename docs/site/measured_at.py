"""Age of a benchmark page: how many commits changed what the page measures, since the commit that it names.

Losses do not depend on the machine, so a page of losses keeps its figures as long as some of its runs, trained again,
have equal ones. benchmarks/kept.py notes that on the page; the age of that part counts from the commit of the check.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "benchmarks"
SOURCE = "src/gossamer"
STEP = ("algorithms", "base", "comm", "train")  # what a training step runs through
LOSS = ("algorithms", "base/kernels", "train")
MEASURES: dict[str, tuple[str, ...]] = {  # packages whose changes can change a page's figures
    "advice": ("algorithms", "plan", "train"),
    "calibration": (*STEP, "plan/estimate"),
    "collective-prices": ("algorithms/collectives", "comm/network"),
    "collectives": ("algorithms/collectives", "base", "comm"),
    "compressors": LOSS,
    "demo": STEP,
    "federated-compression": ("algorithms", "federated"),
    "flower": ("federated", "integrations"),
    "frameworks": (*STEP, "integrations", "horovod"),
    "goodput": (*STEP, "launcher"),
    "jax-slices": (*STEP, "integrations"),
    "ladder": LOSS,
    "local": LOSS,
    "long-links": ("comm",),
    "lost-workers": (*STEP, "launcher"),
    "many-members": ("algorithms/gossip", "algorithms/topologies", "comm/elastic", "comm/membership", "comm/rpc"),
    "memory": STEP,
    "named_stragglers": (*STEP, "observe"),
    "network": STEP,
    "pace": STEP,
    "peers": STEP,
    "peers-kills": (*STEP, "launcher"),
    "recipes": STEP,
    "rehearsals": (*STEP, "plan"),
    "scale": (*STEP, "plan"),
    "staleness": STEP,
    "steps": STEP,
    "stragglers": STEP,
    "time-to-loss": STEP,
    "two-homes": (*STEP, "launcher"),
    "unequal-speeds": LOSS,
    "upload-limit": ("comm",),
}
COMMIT = re.compile(r"(?:commit|from) `([0-9a-f]{7,40})(?:-dirty)?`")
PART = re.compile(r"(<!-- written by a program: [\w ]+ -->.*?<!-- end: [\w ]+ -->)", re.DOTALL)
AGAIN = re.compile(
    r"^Trained again at commit `([0-9a-f]{7,40})`: (?:\d+ % of the steps of )?\d+ of \d+ (?:runs|rows), equal ",
    re.MULTILINE,
)


class Age(NamedTuple):
    """Of one part of a page."""

    commit: str
    date: str  # of the commit, YYYY-MM-DD; empty for a commit that is not in the history
    changes: int  # commits since then that changed what the page measures


def commits(markdown: str) -> list[str]:
    """The commits that a page names as those of its figures, in the order of the page, each once.

    A part between markers, and a page without them, has the commit at which its runs were trained again with equal
    losses, in place of those of the first training.
    """
    parts = PART.split(markdown)
    return list(dict.fromkeys(name for part in parts for name in AGAIN.findall(part) or COMMIT.findall(part)))


def has_history(root: Path) -> bool:
    """Whether `root` is a git checkout with all its commits: a source archive and a shallow clone are not."""
    try:
        return _git(root, "rev-parse", "--is-shallow-repository") == "false"
    except (OSError, subprocess.CalledProcessError):
        return False


def age(commit: str, paths: Sequence[str], root: Path = ROOT) -> Age:
    """The age of figures of a commit.

    Args:
        commit: hash of a commit, may be abbreviated.
        paths: files and folders that were measured, relative to `root`.
        root: a git checkout with all its commits.
    """
    try:
        date = _git(root, "show", "--no-patch", "--format=%cs", commit)
        return Age(commit, date, int(_git(root, "rev-list", "--count", "--no-merges", f"{commit}..HEAD", "--", *paths)))
    except subprocess.CalledProcessError:
        return Age(commit, "", int(_git(root, "rev-list", "--count", "--no-merges", "HEAD", "--", *paths)))


def ages(page: str, markdown: str, root: Path = ROOT) -> list[Age]:
    """The ages of a page's parts, oldest figures first. page: its name, without folder and suffix."""
    paths = [f"{SOURCE}/{name}" for name in MEASURES.get(page, ())]
    found = [age(commit, paths, root) for commit in commits(markdown)] if paths else []
    return sorted(found, key=lambda each: -each.changes)


def with_age(path: str, markdown: str, root: Path = ROOT) -> str:
    """The Markdown of a page with a note before its first section if its figures are older than the code.

    Args:
        path: of the page, relative to docs/.
        markdown: its text.
        root: the checkout; without git's history there is no note.
    """
    page = Path(path).stem
    if not path.startswith("benchmarks/") or page not in MEASURES or not has_history(root):
        return markdown
    title, text = "Age unknown", "This page names no commit for its figures."
    if found := ages(page, markdown, root):
        oldest = found[0]
        if not oldest.changes:
            return markdown
        text = f"Commit `{oldest.commit}` is older than the history of this repository."
        if oldest.date:
            title = f"Measured on {oldest.date}"
            text = (
                f"Since commit `{oldest.commit}`, {oldest.changes} commits have changed code that this page measures."
            )
    note = f'!!! note "{title}"\n    {text} Repeat the command for figures of this version.\n\n'
    heading, newline, rest = markdown.partition("\n")
    return f"{heading}{newline}\n{note}{rest.lstrip()}"


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    for page in sorted(PAGES.glob("*.md")):
        for each in ages(page.stem, page.read_text(encoding="utf-8")):
            print(f"{page.stem:24}{each.commit:12}{each.date or 'unknown':12}{each.changes:6} changes since")
