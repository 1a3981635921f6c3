"""Build and check the files of a release: `make wheels`. They are written to dist/.

    .venv-release/bin/python release/wheels.py            # build and check
    .venv-release/bin/python release/wheels.py --twice    # also: a second build in another folder has the same bytes

The wheels are built from the unpacked sdist, without a network, so the sdist is complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64")
WHEELS = ("any", *PLATFORMS)  # values of GOSSAMER_WHEEL: see hatch_build.py


def build(into: Path) -> list[Path]:
    """Build the sdist of the checkout, and from it one wheel for each of WHEELS.

    Returns:
        The paths of the files.
    """
    shutil.rmtree(into, ignore_errors=True)
    _build(ROOT, into, "--sdist")
    (sdist,) = into.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as packed:
            packed.extractall(folder, filter="data")
        (source,) = Path(folder).iterdir()
        for wheel in WHEELS:
            began = time.monotonic()
            _build(source, into, "--wheel", GOSSAMER_WHEEL=wheel)
            print(f"wheels: {wheel} built in {time.monotonic() - began:.0f} s", flush=True)
    return sorted(into.iterdir())


def _build(source: Path, into: Path, *options: str, **environment: str) -> None:
    """Run the build backend without a network, where the system lets this process make a network namespace."""
    command = (
        *_offline(),
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        *options,
        "--outdir",
        str(into),
        str(source),
    )
    _run(*command, SOURCE_DATE_EPOCH=_date_of_commit(), **environment)


def _offline() -> tuple[str, ...]:
    """The prefix of a command that hides the network; empty if that is not permitted."""
    prefix = ("unshare", "--map-root-user", "--net")
    if shutil.which("unshare") and subprocess.run((*prefix, "true"), capture_output=True, check=False).returncode == 0:
        return prefix
    return ()


@cache
def _date_of_commit() -> str:
    """Seconds since 1970 of the last commit: the time stamp of all files in the archives."""
    done = subprocess.run(("git", "log", "-1", "--format=%ct"), cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "1577836800"


def check(files: list[Path]) -> None:
    """Run the checkers of packaging. Exits if one of them finds a problem."""
    wheels = [path for path in files if path.suffix == ".whl"]
    _run(sys.executable, "-m", "twine", "check", "--strict", *map(str, files))
    # W004: a library that is not a Python module, because ctypes loads it.
    _run(sys.executable, "-m", "check_wheel_contents", "--ignore", "W004", *map(str, wheels))
    for platform in PLATFORMS:
        (wheel,) = (path for path in wheels if path.stem.endswith(platform))
        said = _run(sys.executable, "-m", "auditwheel", "show", str(wheel))
        if (problem := audit_problem(said, platform)) is not None:
            sys.exit(f"wheels: {wheel.name}: {problem}\n{said}")
        print(f"wheels: auditwheel accepts {wheel.name}", flush=True)
    for path in files:
        print(f"{path.stat().st_size / 1e6:8.2f} MB  {digest(path)}  {path.name}")


def audit_problem(said: str, platform: str) -> str | None:
    """Return why the report of `auditwheel show` does not permit the platform's tag; None if it does."""
    text = " ".join(said.split())
    found = text.partition("consistent with the following platform tag: ")[2]
    name = found.strip('"').partition('"')[0]
    if not name:
        return "auditwheel names no platform tag"
    oldest = _glibc(platform)
    if not name.startswith("manylinux") or _glibc(name) > oldest:
        return f"its libraries need {name}, which is newer than {platform}"
    return None


def _glibc(tag: str) -> tuple[int, int]:
    """The version of glibc in a tag such as manylinux_2_28_x86_64."""
    older = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
    first, *rest = tag.split("_")
    return older[first] if first in older else (int(rest[0]), int(rest[1]))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def compare(first: list[Path], second: list[Path]) -> None:
    """Exit if two builds differ in a name or a byte."""
    one, other = ({path.name: digest(path) for path in files} for files in (first, second))
    if one != other:
        differing = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
        sys.exit(f"wheels: a second build differs in {', '.join(differing)}")
    print(f"wheels: a second build has the same bytes in all {len(one)} files")


def _run(*command: str, **environment: str) -> str:
    """Run a command, show its errors as they come, and return its output. Exits if it fails."""
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}\nwheels: failed with exit code {done.returncode}: {' '.join(command)}")
    return done.stdout


if __name__ == "__main__":
    built = build(DIST)
    check(built)
    if "--twice" in sys.argv:
        with tempfile.TemporaryDirectory() as elsewhere:
            compare(built, build(Path(elsewhere) / "dist"))
