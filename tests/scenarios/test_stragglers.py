"""The benchmark of slow workers leaves no control group behind, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from support.paths import BENCHMARKS

PROGRAM = """
import os, signal, sys
sys.path.insert(0, {benchmarks!r})
import stragglers

class Group:
    path = "nowhere"
    def remove(self):
        os.kill(os.getpid(), {number})  # whoever is impatient asks twice
        print("removed", flush=True)

made = iter(range({limit}))
def make(name, share):
    next(made)
    return Group()

stragglers.Group.make = make
{ending}
with stragglers.groups([1.0, 1.0, 1.0, 0.2]):
    os.kill(os.getpid(), {number})
"""
UNHEARD = "stragglers.ending_by_exit = __import__('contextlib').nullcontext"


def removed(number: int, limit: int = 9, ending: str = "") -> tuple[int, int]:
    """How the program ended, and how many groups it removed; it is asked to end, or cannot make more than `limit`."""
    program = PROGRAM.format(benchmarks=str(BENCHMARKS), number=number, limit=limit, ending=ending)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.count("removed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_worker_that_is_asked_to_end_removes_its_groups(number: int) -> None:
    assert removed(number) == (128 + number, 4)


def test_groups_that_stay_are_found() -> None:
    with pytest.raises(AssertionError):
        assert removed(signal.SIGTERM, ending=UNHEARD) == (128 + signal.SIGTERM, 4)


def test_groups_that_were_made_before_one_that_could_not_be_are_removed_too() -> None:
    assert removed(0, limit=2) == (1, 2)
