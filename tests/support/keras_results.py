"""Results of keras_worker.py by backend; one process runs all scenarios of a backend, for the first test that asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.paths import SUPPORT, TESTS

Results = dict[str, Any]


def results_of(backend: str) -> Results:
    """The results of each scenario by its name. Skips the test where Keras or the backend is not installed."""
    for library in ("keras", backend):
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    return _run(backend)


@cache
def _run(backend: str) -> Results:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(TESTS), str(TESTS.parent / "src")]
        done = subprocess.run(
            [sys.executable, str(SUPPORT / "keras_worker.py"), backend, str(out)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=590,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        results: Results = json.loads(out.read_text())
        return results
