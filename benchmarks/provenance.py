"""Provenance: from which commit, by which command and on which machine a page was written."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUICK = ROOT / "runs" / "quick"


def commit(root: Path = ROOT) -> str:
    """The commit that is checked out; with -dirty where sources were changed since, and not the pages alone."""
    try:
        found = _git(root, "rev-parse", "--short=10", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs", ":!README.md")
    except (OSError, subprocess.CalledProcessError) as problem:
        raise SystemExit(
            f"{root} is no git checkout ({problem}), so a page could not say what it measured. Run this in a clone."
        ) from None
    return f"{found}-dirty" if changed else found


def source_commit(root: Path = ROOT) -> str:
    """The last commit that changed the package; with -dirty where the package or a benchmark was changed since.

    The name outlives a branch that changes pages and benchmarks alone.
    """
    found = _git(root, "log", "-1", "--first-parent", "--abbrev=10", "--format=%h", "--", "src/gossamer")
    changed = _git(
        root, "status", "--porcelain", "--untracked-files=no", "--", "src/gossamer", "benchmarks", "examples"
    )
    return f"{found}-dirty" if changed else found


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def provenance(command: Sequence[str] = ()) -> str:
    """A line for the page. command: what wrote it; by default how this process was started."""
    from gossamer.comm.environment.host_info import machine  # torch, which takes seconds and not every import needs
    from gossamer.comm.network import read_network
    from gossamer.plan.emulation import plan

    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    only = plan(read_network("100mbit,1ms", 2)).reason
    networks = f" Networks of `gossamer` commands were only approximated here: {only}." if only else ""
    return f"Written from commit `{commit()}` by `{shlex.join(command or ['python', *sys.argv])}`; {about}.{networks}"


def scratch(page: Path) -> Path:
    """A copy of a page, for numbers that mean nothing."""
    QUICK.mkdir(parents=True, exist_ok=True)
    if page.exists():
        shutil.copy(page, QUICK)
    return QUICK / page.name
