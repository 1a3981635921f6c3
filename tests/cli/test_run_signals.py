"""`gossamer run` and the signals that are not requests to stop."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.processes import engine_files_left_open, watched

from gossamer.cli.main import gossamer

SIGNALED = """
import os, signal, time
heard = []
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: heard.append(number))
    os.kill(os.getppid(), number)
    while number not in heard:
        time.sleep(0.01)
print("handled both", flush=True)
"""


@watched
@pytest.mark.processes
def test_usr1_and_usr2_to_the_launcher_reach_a_script_that_handles_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SIGNALED)
    with chdir(tmp_path), engine_files_left_open():
        done = CliRunner().invoke(gossamer, ["run", "--workers", "1", "train.py"])
    assert done.exit_code == 0, done.output
    assert "handled both" in done.stdout
    assert "SIGUSR2 was forwarded to rank 0" in done.stderr
