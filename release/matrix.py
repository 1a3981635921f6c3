"""Test the versions of Python, torch and other dependencies that Gossamer supports: `make test-matrix`.

    python3 release/matrix.py                   # every row
    python3 release/matrix.py "Python 3.12"     # one

Each row has an environment of its own, in build/matrix. An environment that exists is used again. A row that cannot be
tested here, because its interpreter or a package is missing, keeps that reason. Results are stored in
release/versions.json, and docs/reference/versions.md shows them. PIP_INDEX_URL and PIP_EXTRA_INDEX_URL choose where
torch comes from: its index of CPU builds saves gigabytes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ROOT / "release" / "floors.txt"
RESULTS = ROOT / "release" / "versions.json"
PAGE = ROOT / "docs" / "reference" / "versions.md"
BEGIN, END = "<!-- release/matrix.py writes this table -->", "<!-- end of the table -->"
NAMED = ("torch", "numpy", "safetensors", "click", "rich", "msgspec")
# light extras, of which TESTS has a file each
EXTRAS = ("federated", "notebook", "plot", "prometheus", "tensorboard", "watch")

# A few files for each part that depends on a library: kernels and torch, recipes, hooks of optimizers, the command
# line, each of EXTRAS. A job of two workers follows them.
TESTS = (
    "tests/test_public_api.py",
    "tests/base/kernels/test_quantize.py",
    "tests/base/kernels/test_library.py",
    "tests/algorithms/recipes/test_recipe.py",
    "tests/train/session/test_attach.py",
    "tests/train/checkpoint/test_dcp.py",
    "tests/cli/test_main.py",
    "tests/cli/test_options.py",
    "tests/cli/test_launch.py",
    "tests/comm/test_libcrypto.py",
    "tests/federated/secure_aggregation/test_device.py",
    "tests/observe/exporters",
    "tests/observe/test_plot.py",
    "tests/observe/watch/test_server_app.py",
)
JOB = ("-m", "gossamer", "run", "--workers", "2", "release/two_workers.py")
TEST_PACKAGES = ("pytest>=8", "pytest-timeout>=2.2", "hypothesis>=6.80")


@dataclass(frozen=True)
class Row:
    """One combination of versions.

    Args:
        name: in the table, and on the command line.
        python: version of the interpreter, such as "3.12".
        torch: version of torch; "" for the newest.
        constraints: a file of pip constraints for the other dependencies; None for their newest versions.
    """

    name: str
    python: str
    torch: str = ""
    constraints: Path | None = None


ROWS = (
    Row("oldest versions", "3.11", "2.10.0", FLOORS),
    Row("versions of development", "3.11", "2.13.0", ROOT / "constraints.txt"),
    Row("Python 3.11", "3.11"),
    Row("Python 3.12", "3.12"),
    Row("Python 3.13", "3.13"),
    Row("Python 3.14", "3.14"),
)


class Unavailable(Exception):
    """Why a row cannot be tested on this machine."""


class Broken(Exception):
    """Why the versions of a row cannot be installed together."""


def requirements() -> dict[str, str]:
    """The oldest version that pyproject.toml states for each dependency, those of EXTRAS included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in EXTRAS)]
    here = [requirement for each in lists for requirement in each if ";" not in requirement]  # not of Windows alone
    return dict(requirement.split(">=") for requirement in here)


def interpreter(version: str) -> Path:
    """Return the first working python3.X on PATH or among pyenv's versions."""
    for candidate in _candidates(version):
        asked = (str(candidate), "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])")
        try:
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    raise Unavailable(f"no interpreter of Python {version}")


def _candidates(version: str) -> Iterator[Path]:
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if (Path(folder) / f"python{version}").exists():
            yield Path(folder) / f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python"))


def environment(row: Row, wheel: Path) -> Path:
    """Make or complete the environment of a row. Returns its interpreter."""
    folder = ROOT / "build" / "matrix" / re.sub(r"\W+", "-", row.name)
    python = folder / "bin" / "python"
    if not python.exists():
        _run(str(interpreter(row.python)), "-m", "venv", str(folder))
    limits = ("-c", str(row.constraints)) if row.constraints else ("--upgrade",)
    # Compiling all of torch takes longer than compiling what the tests import.
    install = (str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check")
    # torch first and alone: a resolver that compares its versions downloads each of them.
    if row.torch and _versions(python).get("torch", "").partition("+")[0] != row.torch:
        _run(*install, f"torch=={row.torch}")
    elif not row.torch and "torch" not in _versions(python):
        _run(*install, "torch")
    _run(*install, *limits, *TEST_PACKAGES, *(name for name in requirements() if name != "torch"))
    _run(*install, "--no-deps", "--force-reinstall", str(wheel))
    _run(str(python), "-m", "pip", "check", "--disable-pip-version-check")
    return python


def _versions(python: Path) -> dict[str, str]:
    """The installed versions of the packages of NAMED."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        f"names = {NAMED!r}\n"
        "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions() if d.metadata['Name'] in names}))"
    )
    found: dict[str, str] = json.loads(_run(str(python), "-c", code))
    return found


def measure(row: Row, wheel: Path) -> dict[str, str]:
    """Install the wheel with the row's versions and run TESTS against it. Returns the row's result."""
    began = time.monotonic()
    try:
        python = environment(row, wheel)
    except Unavailable as problem:
        return {"outcome": f"could not be had: {problem}"}
    except Broken as problem:
        print(problem, flush=True)
        return {"outcome": f"FAILED: {str(problem).splitlines()[-1]}", "date": time.strftime("%Y-%m-%d")}
    versions = _versions(python)
    # Not the sources of the checkout, but the installed wheel; warnings of other versions are not errors.
    options = ("-q", "-W", "default", "-p", "no:cacheprovider", "-m", "not processes and not nightly")
    tests = _shown(str(python), "-m", "pytest", *options, *TESTS)
    job = _shown(str(python), *JOB)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", tests.stdout[-200:])
    counts.append("two workers trained" if job.returncode == 0 else "two workers FAILED")
    full = _run(str(python), "-c", "import platform; print(platform.python_version())").strip()
    print(f"matrix: {row.name}: {time.monotonic() - began:.0f} s", flush=True)
    failed = tests.returncode or job.returncode
    outcome = f"{'FAILED' if failed else 'passed'}: {', '.join(counts)}"
    return {"python": full, **versions, "outcome": outcome, "date": time.strftime("%Y-%m-%d")}


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        if "No matching distribution" in done.stderr:
            raise Unavailable(done.stderr.strip().splitlines()[-1].removeprefix("ERROR: "))
        raise Broken(f"{' '.join(command)}\n{done.stdout}{done.stderr}".strip())
    return done.stdout


def _shown(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout and print the end of its output. Its failure is a result, not an error."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout[-4000:], flush=True)
    return done


def commit(root: Path = ROOT) -> str:
    """The commit of a checkout, with -dirty if sources differ from it; "" without git. Pages and results may differ."""
    sources = (".", ":!docs", ":!release/versions.json")
    asked = (("rev-parse", "--short=10", "HEAD"), ("status", "--porcelain", "--untracked-files=no", "--", *sources))
    try:
        done = [subprocess.run(("git", *each), cwd=root, check=True, capture_output=True, text=True) for each in asked]
    except (OSError, subprocess.CalledProcessError):
        return ""
    found, changed = (each.stdout.strip() for each in done)
    return f"{found}-dirty" if changed else found


def differing(sdist: Path, root: Path) -> list[str]:
    """The sources of a checkout that differ from those of an sdist. `make wheels` builds the wheels from the sdist."""
    with tarfile.open(sdist) as packed:
        files = {each.name.partition("/")[2]: packed.extractfile(each) for each in packed if each.isfile()}
        built = {
            name: file.read() for name, file in files.items() if file and name.startswith(("src/", "kernels-src/"))
        }
    paths = [path for folder in ("src", "kernels-src") for path in (root / folder).rglob("*")]
    here = {path.relative_to(root).as_posix() for path in paths if path.suffix in {".py", ".cpp", ".hpp"}}
    missing = [name for name in here if name not in built]
    changed = [name for name, text in built.items() if not (root / name).exists() or (root / name).read_bytes() != text]
    return sorted(missing + changed)


def satisfies(version: str, floor: str) -> bool:
    """Whether `version` is the release of `floor`: 2.10.0 of 2.10, but not 2.11."""
    return (version + ".").startswith(floor + ".")


def table(results: dict[str, dict[str, str]]) -> str:
    """The table of the page, with a line for each row."""
    lines = [f"| row | Python | {' | '.join(NAMED)} | result | date | commit |", "|---" * (len(NAMED) + 5) + "|"]
    for row in ROWS:
        found = results.get(row.name, {"outcome": "not tested yet"})
        cells = [row.name, found.get("python", row.python), *(found.get(name, "") for name in NAMED)]
        tested = f"`{found['commit']}`" if found.get("commit") else ""
        lines.append(f"| {' | '.join([*cells, found['outcome'], found.get('date', ''), tested])} |")
    return "\n".join(lines)


def write_page(results: dict[str, dict[str, str]]) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}")


def stored_results() -> dict[str, dict[str, str]]:
    """The last result of each row that was ever tested."""
    stored: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return stored


def main(names: list[str]) -> None:
    unknown = set(names) - {row.name for row in ROWS}
    if unknown:
        sys.exit(f"matrix: no row is named {', '.join(sorted(unknown))}. Rows: {', '.join(row.name for row in ROWS)}")
    wheels, sdists = (sorted((ROOT / "dist").glob(name)) for name in ("*-manylinux*_x86_64.whl", "*.tar.gz"))
    if not wheels or not sdists:
        sys.exit("matrix: dist/ has no wheel and sdist. Build them: make wheels")
    if changed := differing(sdists[-1], ROOT):
        sys.exit(
            f"matrix: dist/ was built from other sources: {', '.join(changed[:3])} differ. Build again: make wheels"
        )
    failed = []
    tested = commit()
    for row in ROWS:
        if not names or row.name in names:
            found = measure(row, wheels[-1]) | {"commit": tested}
            results = stored_results() | {row.name: found}
            RESULTS.write_text(json.dumps(results, indent=2) + "\n")
            write_page(results)
            if found["outcome"].startswith("FAILED"):
                failed.append(row.name)
    if failed:
        sys.exit(f"matrix: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
