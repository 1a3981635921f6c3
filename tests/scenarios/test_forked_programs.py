"""Programs of tests are forks of one process that has imported torch, and see what new programs see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import forked_programs
from support.nightly import nightly
from support.processes import environment, of_this_checkout

pytestmark = [
    pytest.mark.processes,
    pytest.mark.new_programs,  # each test says which are forks
    pytest.mark.skipif(sys.platform != "linux", reason="other systems start new programs"),
]

OBSERVES = """
import sys
forked = "torch" in sys.modules
import json, os, random, signal, threading, time
from pathlib import Path
import numpy, torch
main = sys.modules["__main__"]
def annotated(x: int): pass
streams = [sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]
print("a line on stderr", file=sys.stderr)
print(json.dumps({
    "forked": forked,
    "draws": [random.random(), torch.rand(1).item(), numpy.random.rand(), torch.initial_seed()],
    "same": {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "name": __name__, "cwd": os.getcwd(),
        "main": [vars(main) is globals(), getattr(main, "__file__", None), str(main.__spec__)[:30]],
        "streams": [[s.encoding, s.errors, s.name, s.line_buffering, s.write_through, s.mode] for s in streams],
        "read": sys.stdin.read(), "parent": os.getppid(), "filters": [str(each) for each in sys.warnoptions],
        "group": [os.getpid() == os.getpgid(0), os.getpid() == os.getsid(0)],
        "signals": [str(signal.getsignal(number)).split(" at ")[0] for number in range(1, 32)],
        "threads": [torch.get_num_threads(), threading.active_count(), threading.current_thread().name],
        "command": Path("/proc/self/cmdline").read_text().strip("\\0").split("\\0"),
        "files": sorted(map(int, os.listdir("/proc/self/fd"))),
        "environment": {**os.environ}, "annotations": str(annotated.__annotations__),
    },
}))
"""


@pytest.fixture(scope="module")
def server() -> None:
    """A server of forks: the first program of each kind is a new one."""
    with pytest.MonkeyPatch.context() as patch, forked_programs.forked_programs():
        patch.setenv("PYTHONPATH", forked_programs.EAGER)
        patch.setenv("OMP_NUM_THREADS", "1")
        subprocess.run([sys.executable, "-c", "pass"], check=True)


@pytest.fixture
def forks(server: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", forked_programs.EAGER)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with forked_programs.forked_programs():
        yield


def said(*command: str, **options: Any) -> dict[str, Any]:
    options = {"capture_output": True, "text": True, "input": "some text", **options}
    done = subprocess.run([sys.executable, *command], check=True, **options)
    assert done.stderr in (None, "a line on stderr\n")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (("-c", OBSERVES, "a", ""), {}),
        (("-m", "folder.observes", "c"), {"start_new_session": True}),
        *nightly(
            (("-u", "observes.py", "b"), {"stderr": subprocess.DEVNULL, "capture_output": False}),
            (("folder/observes.py",), {"process_group": 0}),
        ),
    ],
    ids=["text", "module", "script", "script in a folder"],
)
def test_a_fork_sees_what_a_new_program_sees(
    forks: None, tmp_path: Path, words: tuple[str, ...], options: dict[str, Any]
) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("observes.py", "folder/observes.py"):
        (tmp_path / name).write_text(OBSERVES)
    given = {**of_this_checkout(), "PYTHONPATH": os.pathsep.join((forked_programs.EAGER, *sorted(forked_programs.OWN)))}
    options = {"cwd": tmp_path, "env": {**given, "ODD": "\udcff=x"}, **options}
    if "stderr" in options:
        options["stdout"] = subprocess.PIPE
    one, other = said(*words, **options), said(*words, **options)
    with forked_programs.new_programs():
        new = said(*words, **options)
    assert [each["forked"] for each in (one, other, new)] == [True, True, False]
    assert one["same"] == new["same"]
    assert one["same"]["parent"] == os.getpid()
    for draws in zip(one["draws"], other["draws"], new["draws"], strict=True):
        assert len(set(draws)) == 3


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(9)", -signal.SIGINT),
        ("import sys; sys.exit('a reason')", 1),
        ("import atexit; atexit.register(print, 'the end'); raise SystemExit(7)", 7),
        ("def f(): 1 / 0\nf()", 1),
        ("from __future__ import annotations\nprint((lambda x: x)(3)", 1),
        ("import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.01), print('late'))).start()", 0),
        ("import sys\nsys.excepthook = lambda *error: print('hooked', error[1])\n{}['a']", 1),
    ],
)
def test_a_fork_ends_as_a_new_program(forks: None, text: str, code: int) -> None:
    def ended() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)

    fork = ended()
    with forked_programs.new_programs():
        new = ended()
    assert (fork.returncode, fork.stdout, fork.stderr) == (new.returncode, new.stdout, new.stderr)
    assert fork.returncode == code


FORKED = "import sys; print('torch' in sys.modules)"


@pytest.mark.parametrize(
    ("options", "variables", "keywords"),
    [
        (["-X", "dev"], {}, {}),
        ([], {"PYTHONPATH": "elsewhere"}, {}),
        ([], {"OMP_NUM_THREADS": "2"}, {}),
        ([], {}, {"preexec_fn": os.getpid}),
        *nightly(
            (["-I"], {}, {}),
            (["-S"], {}, {}),
            ([], {"PYTHONPATH": ""}, {}),
            ([], {}, {"pass_fds": (0,)}),
            ([], {}, {"umask": 0o22}),
        ),
    ],
)
def test_forks_replace_no_program_that_they_cannot_be(
    forks: None, options: list[str], variables: dict[str, str], keywords: dict[str, Any]
) -> None:
    words = [sys.executable, *options, "-c", FORKED]
    given = {**os.environ, **variables}
    for _ in range(2):
        assert subprocess.check_output(words, env=given, **keywords) == b"False\n"
    assert subprocess.check_output([sys.executable, "-c", FORKED]) == b"True\n"


def test_a_program_that_does_not_exist_fails_as_ever(forks: None, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "nothing.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "can't open file" in done.stderr
    with pytest.raises(FileNotFoundError):
        subprocess.run([sys.executable, "-c", "pass"], cwd=tmp_path / "nowhere")


def test_warnings_that_are_errors_have_a_server_of_their_own(forks: None) -> None:
    filters = "error::FutureWarning,ignore::ImportWarning"  # of no other test: the first program of a kind is a new one
    given = environment(0, 2, 0) | {"PYTHONWARNINGS": filters}
    text = f"{FORKED}; import warnings; warnings.warn('changed', FutureWarning)"
    first, second = (subprocess.run([sys.executable, "-c", text], env=given, capture_output=True) for _ in range(2))
    assert (first.stdout, second.stdout) == (b"False\n", b"True\n")
    assert first.stderr == second.stderr
    assert b"FutureWarning: changed" in second.stderr
    assert second.returncode == 1


def test_modules_can_be_imported_before_the_forks(forks: None) -> None:
    text = "import sys; print([name in sys.modules for name in ('torch', 'this_one')])"
    with forked_programs.preloaded("xml.dom.minidom"):
        said = subprocess.check_output([sys.executable, "-c", text.replace("this_one", "xml.dom.minidom")])
    assert said == b"[True, True]\n"
    assert subprocess.check_output([sys.executable, "-c", text.replace("this_one", "xml.dom.minidom")]) == (
        b"[True, False]\n"
    )


def test_a_module_that_is_imported_already_runs_without_a_warning(forks: None) -> None:
    with forked_programs.preloaded("json.tool"):
        done = subprocess.run([sys.executable, "-m", "json.tool"], input="[]", capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_programs_start_when_the_server_was_killed(forks: None) -> None:
    find = "import os; print(open(f'/proc/{os.getppid()}/task/{os.getppid()}/children').read())"
    children = [int(pid) for pid in subprocess.check_output([sys.executable, "-c", find]).split()]
    for pid in children:
        command = Path(f"/proc/{pid}/cmdline")
        if command.exists() and forked_programs.__file__.encode() in command.read_bytes():
            os.kill(pid, signal.SIGKILL)
    try:
        assert subprocess.check_output([sys.executable, "-c", FORKED]) == b"False\n"
    finally:
        forked_programs.end_servers()  # the next test has another one
