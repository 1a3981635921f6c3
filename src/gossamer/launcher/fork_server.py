"""Fork server: one process that has imported torch, and that forks the workers of `gossamer run`.

N workers that start as new programs import torch N times, on the cores of one machine. Forks share one import and its
memory. The server is a fork of the launcher itself, from the moment after it imported torch, and has one thread. It
imports the workers' program and what most scripts need next, while the launcher continues with its own imports.
A worker is forked twice, so that it becomes a child of the launcher, which waits for it as for a new program. Where
that is impossible, each worker is a new program.

In runs that replace lost workers, the server later warms up: it imports what torch and a session import on first use.
Then the replacement of a lost worker is one more fork. The server does not import the script's modules, which may start
threads or use a GPU: a fork would have neither.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, auto
from importlib import import_module
from pathlib import Path

from gossamer.base import system
from gossamer.launcher.job import Spawn, spawn

MAY_FORK = object()  # click's context object in a process that does nothing but run a command
VARIABLE = "GOSSAMER_FORK"
POLL_SECONDS = 0.001
REPLY_SECONDS = 60.0  # a fork takes milliseconds, and more if memory is scarce
PLAIN_STARTS = ("-c", "-m")  # other options of Python change the interpreter, and new workers have none


def new_program(module: str) -> tuple[str, ...]:
    """Command of a worker that is a new program, without its arguments."""
    return (sys.executable, "-u", "-m", module)


@contextlib.contextmanager
def fork_server(module: str, threads: str | None) -> Iterator[Spawn]:
    """Context manager: a function that starts workers as forks; `spawn` itself where new programs are safer.

    In the server and in each of its workers, the statement raises ServesForks. Call its `serve` outside of all blocks.

    Args:
        module: the program of a worker, which has a function `main`.
        threads: OMP_NUM_THREADS when this process imported torch; None if it was not set. Forks keep its effect.
    """
    if not _may_fork():
        yield spawn
        return
    server = ForkServer(module, threads)
    try:
        yield server
    finally:
        server.close()


def _may_fork() -> bool:
    return (
        os.environ.get(VARIABLE) != "0"
        and threading.active_count() == 1
        and all(not text.startswith("-") or text in PLAIN_STARTS for text in sys.orig_argv[1:2])
        and system.adopt_orphans(True)
        and system.adopt_orphans(False)
    )


class Readiness(Enum):
    """The server's state as far as the launcher knows it."""

    COLD = auto()  # it has imported what workers import at their start
    WARMING = auto()  # it imports more, and reads no orders meanwhile
    WARM = auto()
    LOST = auto()  # it has ended


class ForkServer:
    """The launcher's side of the server. It implements job.WarmSpawn."""

    def __init__(self, module: str, threads: str | None) -> None:
        self._new_program, self._threads = new_program(module), threads
        sys.stdout.flush()
        sys.stderr.flush()
        self._connection, server_end = socket.socketpair()
        pid = system.fork()
        if not pid:
            self._connection.close()
            raise ServesForks(server_end, module)
        server_end.close()
        self._process = ForkedProcess(pid)
        self._connection.settimeout(REPLY_SECONDS)
        self._replies = self._connection.makefile("rb")
        self._readiness = Readiness.COLD

    def __call__(
        self, command: Sequence[str], environment: Mapping[str, str], output: Path, boot: Path
    ) -> system.Process:
        """Start a worker as `spawn` does: as a fork, or as a new program if its command or threads differ.

        It is a new program also while the server warms up, because the launcher must not wait for that.
        """
        if self._can_be_fork(command, environment) and self.reads_orders:
            claimed = boot.with_name(f"{boot.name}-{secrets.token_hex(4)}")
            files = [str(path.absolute()) for path in (output, boot, claimed)]
            if pid := self._fork(Order(list(command[4:]), dict(environment), files)):
                return ForkedProcess(pid)
        return spawn(command, environment, output, boot)

    def warm_up(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Let the server warm up, unless it has or does. Return at once.

        Args:
            command: of a worker.
            environment: the variables that all workers share.

        Returns:
            Whether later workers with them will be forks. False if the server has ended, for example because forks of
            it were not safe any more.
        """
        if not self._can_be_fork(command, environment):
            return False
        if self._readiness is Readiness.COLD:
            self._readiness = Readiness.WARMING
            self._send(Order([], dict(environment), []))
        return self.reads_orders or self._readiness is Readiness.WARMING

    @property
    def reads_orders(self) -> bool:
        """Whether the server has not ended, and is not warming up."""
        if self._readiness is Readiness.WARMING and select.select([self._connection], [], [], 0)[0] and self._reply():
            self._readiness = Readiness.WARM
        return self._readiness in (Readiness.COLD, Readiness.WARM)

    def _can_be_fork(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        return tuple(command[:4]) == self._new_program and environment.get("OMP_NUM_THREADS") == self._threads

    def _fork(self, order: Order) -> int:
        """Return the process id of the new worker, a child of this process; 0 if the server cannot fork.

        A server that is late or was killed may have forked a worker, or do so later. That worker runs if it claims the
        start before this process does; otherwise it ends.
        """
        system.adopt_orphans(True)
        try:
            self._send(order)
            pid = self._reply() or claim(order.files[-1])
            return 0 if pid == os.getpid() else pid
        finally:
            system.adopt_orphans(False)

    def _send(self, order: Order) -> None:
        with contextlib.suppress(OSError):  # if the server was killed, there is no reply, either
            self._connection.sendall(json.dumps(asdict(order)).encode() + b"\n")

    def _reply(self) -> int:
        """The server's answer to an order; 0 if it cannot fork or has ended."""
        with contextlib.suppress(OSError):
            if reply := self._replies.readline():
                return int(reply)
        self._readiness = Readiness.LOST
        return 0

    def close(self) -> None:
        """End the server. Its workers continue."""
        self._replies.close()
        self._connection.close()
        self._process.send_signal(system.KILL)
        self._process.wait()


def claim(path: str) -> int:
    """Claim a start. Returns the id of the process that was the first to claim it. path: of the start's symbolic link,
    which the system creates together with its target, the id."""
    with contextlib.suppress(FileExistsError):
        os.symlink(str(os.getpid()), path)
    return int(os.readlink(path))


@dataclass(frozen=True)
class Order:
    """A request for a worker, or to warm up."""

    arguments: list[str]
    environment: dict[str, str]
    files: list[str]  # for stdout, stderr and the claim of a worker; empty to warm up


class ServesForks(BaseException):
    """Raised in the fork server, so that it leaves the launcher's frames. Not an Exception: click handles those."""

    def __init__(self, connection: socket.socket, module: str) -> None:
        super().__init__()
        self._connection, self._module = connection, module

    def serve(self, *errors: str | None) -> None:
        """Fork workers until the launcher closes the connection, then end. Returns in each worker, after `main`.

        errors: how stdout and stderr handled characters that they cannot encode, at the start of this process.
        """
        system.begin_session()  # signals of the terminal are for the launcher
        on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.disable()
        for module in (self._module, "gossamer.train.session.attach"):
            import_module(module)
        gc.freeze()  # collections in workers neither read nor copy the memory that they share
        with self._connection, self._connection.makefile("rb") as lines:
            orders = (Order(**json.loads(line)) for line in lines)
            order = next((order for order in orders if self._carry_out(order)), None)
        if order is None:
            os._exit(0)
        gc.enable()
        signal.signal(signal.SIGINT, on_interrupt)
        for stream, handling in zip((sys.stdout, sys.stderr), errors, strict=True):
            stream.reconfigure(errors=handling, write_through=True)  # type: ignore[union-attr]
        _become(order, self._module)
        import_module(self._module).main()

    def _carry_out(self, order: Order) -> bool:
        """Returns True in a new worker."""
        if order.files:
            return self._fork()
        if not _warm_up(order.environment):
            os._exit(1)
        self._answer(1)
        return False

    def _fork(self) -> bool:
        """Fork a worker and send its process id to the launcher. Returns True in the worker.

        Its parent is a fork that ends at once, so that the system gives it to the launcher, which adopts orphans then.
        """
        reading, writing = os.pipe()
        try:
            parent = system.fork()
            if not parent:
                _fork_again(writing)
                return True
            os.close(writing)
            worker = int(os.read(reading, 32) or b"0")
            system.exit_code_of(parent)  # from here on the launcher is the parent
        except OSError:  # too many processes, or too little memory
            worker = 0
        finally:
            os.close(reading)
        self._answer(worker)
        return False

    def _answer(self, number: int) -> None:
        with contextlib.suppress(OSError):  # the launcher was killed, so that no more orders come
            self._connection.sendall(b"%d\n" % number)


def _fork_again(writing: int) -> None:
    """Returns in the child, the worker, as the leader of a new process group, once its parent has ended."""
    parent = os.getpid()
    try:
        if system.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    system.begin_session()
    os.write(writing, str(os.getpid()).encode())
    os.close(writing)
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)


def _warm_up(environment: Mapping[str, str]) -> bool:
    """Import what workers import after their start. Returns whether this process can still be forked."""
    threads = system.native_threads()
    os.environ.update(environment)
    try:
        import_module("gossamer.launcher.worker").warm_up()
    except Exception:  # the workers report it
        return False
    gc.collect()  # not frozen: triton prints what is left of it at the end of a worker
    return system.native_threads() <= threads and not _forks_lack_gpu()


def _forks_lack_gpu() -> bool:
    """Whether forks of this process cannot use a GPU, because it has used one. A fork finds out."""
    try:
        probe = system.fork()
    except OSError:
        return True
    if not probe:
        os._exit(_is_without_gpu())
    return system.exit_code_of(probe) != 0


def _is_without_gpu() -> bool:
    """Whether this process is a fork of one that had used a GPU."""
    return bool(getattr(sys.modules["torch"]._C, "_cuda_isInBadFork", bool)())


def _become(order: Order, module: str) -> None:
    """Give this process the arguments, environment, output and random numbers of a new program, unless the launcher has
    given up this start."""
    *outputs, claimed = order.files
    if claim(claimed) != os.getpid():
        os._exit(0)
    for descriptor, path in enumerate(outputs, start=1):
        with open(path, "wb", buffering=0) as file:
            os.dup2(file.fileno(), descriptor)
    if _is_without_gpu():
        command = [*new_program(module), *order.arguments]
        os.execve(command[0], command, order.environment)
    os.environ.clear()
    os.environ.update(order.environment)
    sys.argv = [str(import_module(module).__file__), *order.arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:  # its global generator would be the same in all workers
        sys.modules["numpy.random"].seed()


class ForkedProcess:
    """A child of this process that is not a new program. It implements system.Process, as subprocess.Popen does."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        if self._exit_code is None:
            self._exit_code = system.exit_code_of(self.pid, wait=False)
        return self._exit_code

    def wait(self) -> int:
        while (exit_code := self.poll()) is None:
            self._exit_code = system.exit_code_of(self.pid)
        return exit_code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
