"""Python programs that tests start, as forks of one process that has imported torch and gossamer.

To import them takes seconds, to fork takes milliseconds. Within `forked_programs`, `subprocess.Popen` starts
`python SCRIPT`, `python -c TEXT` and `python -m MODULE` as forks, which see what new programs see, except that modules
are imported already and that strings have the same hashes in all. Other commands, options of Python and of Popen, and
environments that imports of the server did not have, keep new programs.

python forked_programs.py MODULES: the server. Its stdin is a socket, on which each order is a header, the three files
of the new process, and a JSON text; the answer is a process id. A fork of the server's child is the new process: its
parent has ended, and the system gives it to the process of the test, as long as that one adopts orphans.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

TESTS = Path(__file__).parents[1]
EAGER, OWN = str(TESTS / "eager"), {str(TESTS), str(TESTS.parent), str(TESTS.parent / "src")}
USUAL = ("gossamer.cli.worker", "gossamer.cli.run_training", "gossamer.train.session.attach")
READ_BY_IMPORTS = ("PYTHON", "OMP_", "MKL_", "KMP_", "LD_", "TRITON_", "TORCH_CPP_", "TORCH_LOGS", "GOSSAMER_KERNELS")
WORDS_OF_OPTIONS = {"-u": 1, "-W": 2}  # options of Python that a fork can have
HEADER_BYTES = 12
SHOWN_BYTES = 4096  # of a program's command in the list of processes
START_SECONDS, POLL_SECONDS = 120.0, 0.001
NOTHING_ELSE = {
    "executable": None, "preexec_fn": None, "close_fds": True, "pass_fds": (), "shell": False, "gid": None,
    "gids": None, "uid": None, "umask": -1,
}  # fmt: skip
PARAMETERS = [*inspect.signature(subprocess.Popen._execute_child).parameters][1:]  # type: ignore[attr-defined]
Key = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]  # options of Python, variables


@dataclass(frozen=True)
class Order:
    """A program to start, as `Popen` receives it. group: as its process_group; -1 for the caller's."""

    options: list[str]  # of Python
    arguments: list[str]  # after them
    environment: dict[str, str]
    folder: str
    session: bool
    group: int


# -- in the process of the tests ---------------------------------------------------------------------------------------


class ForkedPrograms:
    """Starts programs, each as a fork of the server with its environment; one per process of the tests."""

    def __init__(self) -> None:
        self.preload: tuple[str, ...] = ()
        self._servers: dict[tuple[Key, tuple[str, ...]], Server | None] = {}  # None: requested once
        self.rests = False  # while all programs are to be new ones
        self._lock = threading.RLock()
        self._owner = os.getpid()

    def start(self, process: subprocess.Popen[Any], given: Mapping[str, Any]) -> bool:
        """Start the program of this Popen as a fork. Returns False, having done nothing, if it must be a new one."""
        order = None if self.rests or os.getpid() != self._owner else order_of(given)
        if order is None or not (key := read_by_imports(order)):
            return False
        named = enumerate(given[name] for name in ("p2cread", "c2pwrite", "errwrite"))
        files = [own if file == -1 else file for own, file in named]
        with self._lock:
            server = self._server(key, self.preload)
            pid = server.fork(order, files) if server else 0
        if not pid:
            return False
        process.pid, process._child_created = pid, True  # type: ignore[attr-defined]
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        process._close_pipe_fds(*(given[name] for name in ends))  # type: ignore[attr-defined]
        return True

    def _server(self, key: Key, preload: tuple[str, ...]) -> Server | None:
        """A server with these variables and modules. The first program of its kind is a new one: it may be the last."""
        if (key, preload) not in self._servers and not preload:
            self._servers[key, preload] = None
            return None
        found = self._servers.get((key, preload))
        if found is None:
            self.preload, self.rests = (), not preload  # a server with more modules is a fork of the usual one
            try:
                found = self._servers[key, preload] = Server(key, preload)
            finally:
                self.preload, self.rests = preload, False
        return found

    def end(self, preload: tuple[str, ...] | None = None) -> None:
        """End the servers; those of these modules only, if given. Programs continue."""
        for key in [key for key in self._servers if preload in (None, key[1])]:
            if server := self._servers.pop(key):
                server.end()


class Server:
    """The side of the tests of a process that forks."""

    def __init__(self, key: Key, preload: Sequence[str]) -> None:
        options, variables = key
        self._connection, end = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(READ_BY_IMPORTS)}
        environment |= dict(variables)
        if preload:  # modules of tests, too; forks remove the folder again
            environment["PYTHONPATH"] = os.pathsep.join((EAGER, str(TESTS)))
        command = [sys.executable, *options, __file__, *(preload or USUAL), " " * SHOWN_BYTES]
        with end:
            self._process = subprocess.Popen(command, env=environment, stdin=end, cwd=TESTS)
        self._connection.settimeout(START_SECONDS)
        self._lost = False
        try:
            read(self._connection, HEADER_BYTES)  # it has imported the modules
        except (OSError, EOFError):
            self.end()
        except BaseException:
            self.end()
            raise

    def fork(self, order: Order, files: Sequence[int]) -> int:
        """Process id of the new program, a child of this process; 0 if none could be started."""
        from gossamer.base.system import adopt_orphans

        if self._lost or not adopt_orphans(True):
            return 0
        text = json.dumps(asdict(order)).encode()
        complete = False
        try:
            socket.send_fds(self._connection, [b"%*d" % (HEADER_BYTES, len(text))], files)
            self._connection.sendall(text)
            pid = int(read(self._connection, HEADER_BYTES))
            complete = True
        except (OSError, EOFError):
            pid = 0
        finally:
            adopt_orphans(False)
            if not complete:
                self.end()
        return pid

    def end(self) -> None:
        self._lost = True
        self._connection.close()
        self._process.kill()
        self._process.wait()


_programs = ForkedPrograms()


@contextlib.contextmanager
def forked_programs() -> Iterator[None]:
    """Within it, `subprocess.Popen` starts Python programs as forks."""
    usual = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def start(self: subprocess.Popen[Any], *arguments: Any) -> None:
        if not _programs.start(self, dict(zip(PARAMETERS, arguments, strict=True))):
            usual(self, *arguments)

    subprocess.Popen._execute_child = start  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = usual  # type: ignore[attr-defined]


@contextlib.contextmanager
def new_programs() -> Iterator[None]:
    """Within it, programs are new ones, as without `forked_programs`."""
    before, _programs.rests = _programs.rests, True
    try:
        yield
    finally:
        _programs.rests = before


@contextlib.contextmanager
def preloaded(*modules: str) -> Iterator[None]:
    """Within it, forks have imported these modules, too. Where programs are new ones, it has no effect."""
    _programs.preload = modules
    try:
        yield
    finally:
        _programs.preload = ()
        if modules:
            _programs.end(modules)


def end_servers() -> None:
    _programs.end()


def order_of(given: Mapping[str, Any]) -> Order | None:
    """The order for a call of Popen's `_execute_child`; None for a program that a fork cannot replace."""
    words = given["args"]
    if isinstance(words, (str, bytes, os.PathLike)) or any(given[name] != NOTHING_ELSE[name] for name in NOTHING_ELSE):
        return None
    program, *rest = map(os.fsdecode, words)
    options = []
    while rest and rest[0] in WORDS_OF_OPTIONS:
        count = WORDS_OF_OPTIONS[rest[0]]
        options += rest[:count]
        del rest[:count]
    folder = os.fsdecode(given["cwd"] or os.getcwd())
    if program != sys.executable or not rest or not os.path.isdir(folder):
        return None
    if rest[0] in ("-c", "-m"):
        if len(rest) == 1:
            return None
    elif rest[0].startswith("-") or not os.path.isfile(os.path.join(folder, rest[0])):
        return None
    environment = os.environ if given["env"] is None else given["env"]
    return Order(
        options=options,
        arguments=rest,
        environment={os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()},
        folder=os.path.abspath(folder),
        session=bool(given["start_new_session"]),
        group=given["process_group"],
    )


def paths_of(environment: Mapping[str, str]) -> list[str]:
    return [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]


def read_by_imports(order: Order) -> Key | None:
    """Options and variables on which imports depend; None if they need an interpreter of their own.

    Folders of this project's own source add nothing to an installed one.
    """
    found = {name: value for name, value in order.environment.items() if name.startswith(READ_BY_IMPORTS)}
    if [path for path in paths_of(found) if path not in OWN] != [EAGER] or found.get("OMP_NUM_THREADS") != "1":
        return None
    options = tuple(option for option in order.options if option != "-u")
    return options, tuple(sorted((found | {"PYTHONPATH": EAGER}).items()))


def read(connection: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        if not (part := connection.recv(count - len(parts))):
            raise EOFError
        parts += part
    return parts


# -- in the server and in its forks ------------------------------------------------------------------------------------


def main() -> None:
    with socket.socket(fileno=os.dup(0)) as connection:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the tests
        del sys.path[0]  # the folder of this file
        gc.disable()
        for module in sys.argv[1:-1]:
            importlib.import_module(module)
        if len(os.listdir("/proc/self/task")) > 1:
            return  # a fork would lack the other threads
        gc.freeze()
        connection.sendall(b"%*d" % (HEADER_BYTES, os.getpid()))
        order, files = next_order(connection)
    become(order, files)
    sys.orig_argv = [sys.executable, *order.options, *order.arguments]
    run(order.arguments)


def next_order(connection: socket.socket) -> tuple[Order, list[int]]:
    """Fork for each order until the connection ends. Returns in each fork, with its order and files."""
    while True:
        header, files, _, _ = socket.recv_fds(connection, HEADER_BYTES, 3)
        if not header:
            os._exit(0)
        header += read(connection, HEADER_BYTES - len(header))
        order = Order(**json.loads(read(connection, int(header))))
        if (pid := fork()) is None:
            return order, files
        for file in files:
            os.close(file)
        connection.sendall(b"%*d" % (HEADER_BYTES, pid))


def fork() -> int | None:
    """Process id of a new process whose parent has ended; None in that process; 0 if there can be none."""
    reading, writing = os.pipe()
    try:
        between = os.fork()
    except OSError:
        between = -1
    if between == 0:
        parent = os.getpid()
        try:
            if os.fork():
                os._exit(0)
        except OSError:
            os._exit(1)
        os.write(writing, b"%d" % os.getpid())
        os.close(writing)
        os.close(reading)
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        return None
    os.close(writing)
    pid = int(os.read(reading, HEADER_BYTES) or b"0")
    os.close(reading)
    if between > 0:
        os.waitpid(between, 0)
    return pid


def become(order: Order, files: Sequence[int]) -> None:
    """Give this process the files, environment, group and random numbers of a new program."""
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(order.folder)
    if order.session:
        os.setsid()
    elif order.group >= 0:
        os.setpgid(0, order.group)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = paths_of(os.environ)
    os.environ.clear()
    os.environ.update(order.environment)
    sys.path[:] = dict.fromkeys([*paths_of(os.environ), *(path for path in sys.path if path not in before)])
    importlib.invalidate_caches()
    show([sys.executable, *order.options, *order.arguments])
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        renew(name, descriptor, mode, unbuffered="-u" in order.options or bool(os.environ.get("PYTHONUNBUFFERED")))
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    gc.enable()


def show(command: Sequence[str]) -> None:
    """Show this command in the list of processes."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, by proc(5)
    text = b"".join(os.fsencode(word) + b"\0" for word in command)[: end - begin]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def renew(name: str, descriptor: int, mode: str, *, unbuffered: bool) -> None:
    """Make a standard stream what it is in a new program."""
    before = getattr(sys, name)
    raw = io.FileIO(descriptor, mode, closefd=False)
    raw.name = f"<{name}>"
    if mode == "r":
        buffer: Any = io.BufferedReader(raw)
    else:
        buffer = raw if unbuffered else io.BufferedWriter(raw)
    lines = not unbuffered and (name == "stderr" or raw.isatty())
    stream = io.TextIOWrapper(buffer, before.encoding, before.errors, "\n", lines, write_through=unbuffered)
    stream.mode = mode  # type: ignore[misc]
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def run(arguments: list[str]) -> None:
    """Run the program in a `__main__` of its own. Its uncaught errors show no frames of this file."""
    kind, *rest = arguments
    program = sys.modules["__main__"] = ModuleType("__main__")
    program.__dict__["__builtins__"] = builtins
    try:
        if kind == "-m":
            start(os.getcwd(), ["-m", *rest[1:]])
            sys.modules.pop(rest[0], None)  # or it would run with a warning
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        elif kind == "-c":
            start("", ["-c", *rest[1:]])
            exec(compiled(rest[0], "<string>"), program.__dict__)
        else:
            start(str(Path(kind).resolve().parent), arguments)
            program.__file__ = os.path.abspath(kind)
            program.__loader__ = SourceFileLoader("__main__", program.__file__)
            exec(compiled(Path(kind).read_bytes(), program.__file__), program.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals is globals():
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if not isinstance(error, KeyboardInterrupt):
            raise SystemExit(1) from None
        sys.excepthook = lambda *_: None  # it has been printed
        raise KeyboardInterrupt from None  # Python ends as if by the signal


def start(folder: str, arguments: list[str]) -> None:
    sys.argv[:] = arguments  # default values of functions are this list
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def compiled(source: str | bytes, name: str) -> CodeType:
    return compile(source, name, "exec", dont_inherit=True)


if __name__ == "__main__":
    main()
