from __future__ import annotations

import subprocess
import sys

from gossamer.base.tracing.clock_identity import clock_identity


def test_processes_of_this_machine_share_a_clock_where_that_is_known() -> None:
    script = "from gossamer.base.tracing.clock_identity import clock_identity; print(clock_identity())"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert clock_identity() == clock_identity()
    assert (other == clock_identity()) == clock_identity().startswith("boot-")
