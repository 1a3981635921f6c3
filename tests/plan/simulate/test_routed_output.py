"""Each worker's printing goes its own way."""

from __future__ import annotations

import io
import sys
import threading
from contextvars import copy_context

import pytest

from gossamer.plan.simulate.routed_output import routed, sink


def test_a_thread_with_a_sink_prints_there(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = [io.StringIO(), io.StringIO()]

    def work(output: io.StringIO) -> None:
        sink.set(output)
        print("mine")
        sys.stderr.write("too")

    before = sys.stdout
    with routed():
        threads = [threading.Thread(target=copy_context().run, args=(work, output)) for output in outputs]
        for thread in threads:
            thread.start()
            thread.join()
        print("the process's")
        assert sys.stdout.fileno is not None
    assert [output.getvalue() for output in outputs] == ["mine\ntoo", "mine\ntoo"]
    assert capsys.readouterr().out == "the process's\n"
    assert sys.stdout is before
