"""System: calls that not all operating systems have, each with a portable answer.

No other module asks for the platform or uses a call of one family of systems: `make check-systems` type-checks the
package for Linux, macOS and Windows. On Windows, psutil replaces the calls of POSIX.
"""

from __future__ import annotations

import _thread
import ctypes
import faulthandler
import io
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, Protocol

if sys.platform == "win32":
    import msvcrt

    import psutil
else:
    import fcntl
    import resource

IS_LINUX, IS_WINDOWS = sys.platform == "linux", sys.platform == "win32"
OTHERWISE = ": on Windows use WSL2, on macOS a machine or container with Linux"  # after 'X needs Linux'
LOOPBACK_INTERFACE = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)  # None: unknown
LIBCRYPTO = "libcrypto.3.dylib" if sys.platform == "darwin" else "libcrypto.so.3"
SET_CHILD_SUBREAPER = 36  # of prctl
LOCKED_BYTE = 2**30  # Windows locks bytes of a file, also against readers: one behind the content


# -- signals and processes ---------------------------------------------------------------------------------------------


def signals(*names: str) -> tuple[signal.Signals, ...]:
    """Return those of the named signals that this system has. Windows has neither SIGHUP nor SIGUSR1."""
    return tuple(signal.Signals[name] for name in names if hasattr(signal, name))


(KILL,) = signals("SIGKILL") or (signal.SIGTERM,)  # on Windows, SIGTERM ends a process at once, too


def interrupt_main_thread(number: signal.Signals) -> None:
    """Run the main thread's handler of this signal, also if it is in a system call."""
    if sys.platform == "win32":
        _thread.interrupt_main(number)
    else:
        signal.pthread_kill(threading.main_thread().ident or 0, number)


def stop_this_process(number: signal.Signals) -> None:
    """Run this process's handler of a signal, from any thread. On Windows, os.kill would end the process."""
    if sys.platform == "win32":
        _thread.interrupt_main(number)
    else:
        os.kill(os.getpid(), number)


class Process(Protocol):
    """A child of this process: a subprocess.Popen, or a fork."""

    pid: int

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it is running."""

    def wait(self) -> int:
        """Exit code, as soon as it has ended."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal, unless it has ended."""


def start_group(
    command: Sequence[str], environment: Mapping[str, str] | None = None, **streams: IO[Any] | int | None
) -> subprocess.Popen[bytes]:
    """Start a process that leads a process group, so that a signal of the terminal does not reach it.

    Windows has no such groups: Ctrl-C reaches all processes of a console.
    """
    return subprocess.Popen(command, env=environment, start_new_session=True, **streams)  # type: ignore[call-overload,no-any-return]


def request_end(process: Process, number: signal.Signals) -> None:
    """Send a signal that asks a process to end.

    On Windows, the console sends Ctrl-C itself, and any other request ends the process at once.
    """
    if sys.platform != "win32" or number != signal.SIGINT:
        process.send_signal(number)


def kill_group(leader: int) -> None:
    """Kill a process and its helpers, if they exist."""
    if sys.platform == "win32":
        _to_tree(leader, psutil.Process.kill)
    else:
        _to_group(leader, signal.SIGKILL)


def kill_own_group() -> None:
    """Kill this process and its helpers."""
    if sys.platform == "win32":
        kill_group(os.getpid())
    else:
        kill_group(os.getpgrp())


def pause_group(leader: int) -> None:
    """Stop a process and its helpers until `resume_group`, if they exist."""
    if sys.platform == "win32":
        _to_tree(leader, psutil.Process.suspend)
    else:
        _to_group(leader, signal.SIGSTOP)


def resume_group(leader: int) -> None:
    if sys.platform == "win32":
        _to_tree(leader, psutil.Process.resume)
    else:
        _to_group(leader, signal.SIGCONT)


if sys.platform == "win32":

    def _to_tree(leader: int, action: Callable[[psutil.Process], None]) -> None:
        """Helpers of a process that has ended are not found: Windows has no process groups."""
        with suppress(psutil.Error):
            first = psutil.Process(leader)
            for process in (*first.children(recursive=True), first):
                with suppress(psutil.Error):
                    action(process)
else:

    def _to_group(leader: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, number)


def fork() -> int:
    """Fork this process. Returns the child's process id, and 0 in the child. Raises OSError on Windows."""
    if sys.platform == "win32":
        raise OSError("Windows does not fork processes")
    return os.fork()


def begin_session() -> None:
    """Make this process the leader of a new process group without a terminal."""
    if sys.platform != "win32":
        os.setsid()


def exit_code_of(child: int, *, wait: bool = True) -> int | None:
    """Exit code of a fork of this process, negative for a signal; None if it is running and must not be waited for."""
    if sys.platform == "win32":
        raise OSError("Windows does not fork processes")
    try:
        ended, status = os.waitpid(child, 0 if wait else os.WNOHANG)
    except ChildProcessError:  # this process ignores the ends of its children: subprocess.Popen returns 0 then
        return 0
    return os.waitstatus_to_exitcode(status) if ended else None


def adopt_orphans(adopt: bool) -> bool:
    """Let this process become the parent of processes that its descendants leave behind. Returns whether it can."""
    if sys.platform != "linux":
        return False
    try:
        return bool(ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, ctypes.c_ulong(adopt), 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def native_threads() -> int:
    """Number of threads of this process, with those of native libraries on Linux."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # another system, or no /proc
        return threading.active_count()


def is_root() -> bool:
    """Whether this process has the rights of root, possibly in a user namespace."""
    return sys.platform != "win32" and os.geteuid() == 0


def after_fork_in_child(action: Callable[[], None]) -> None:
    """Call `action` in every forked child; nothing where processes cannot fork."""
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=action)


def dump_stacks_on(number: int, file: int) -> None:
    """Write the stacks of all threads to a file on this signal, also in native code; nothing on Windows."""
    if sys.platform != "win32":
        faulthandler.register(number, file, all_threads=True, chain=True)


def dump_no_stacks_on(number: int) -> None:
    if sys.platform != "win32":
        faulthandler.unregister(number)


# -- files -------------------------------------------------------------------------------------------------------------


class File(io.FileIO):
    """A binary file without a buffer. It can be closed again, unlike a number of os.open: the next file may get it."""

    def __del__(self) -> None:
        self.close()  # io.FileIO would warn; processes that tests simulate are killed with open files


def open_file(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> File:
    """Open a binary file with the flags and the mode of os.open. Children do not inherit it."""
    return File(os.open(path, flags | getattr(os, "O_BINARY", 0), mode), "r+")


def write_all(file: File, data: bytes | memoryview) -> None:
    """Write to a file of `open_file`. Raises OSError, possibly after a part of the data."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file.fileno(), rest) :]


def sync_file(handle: int) -> None:
    """Return once the written content is on the disk. On macOS, fsync alone leaves it in the disk's cache."""
    if sys.platform == "darwin":
        with suppress(OSError):  # a file system without it, such as a network's
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
            return
    os.fsync(handle)


def sync_folder(folder: Path) -> None:
    """Return once the names in a folder are on the disk. Windows opens no folders: a power failure can lose names."""
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY)
        try:
            sync_file(handle)
        finally:
            os.close(handle)


def lock_file(handle: int) -> None:
    """Lock an open file until it is closed or this process ends.

    Raises:
        BlockingIOError: Another open file has the lock.
        OSError: The file system has no locks.
    """
    if sys.platform == "win32":
        before = os.lseek(handle, 0, os.SEEK_CUR)
        os.lseek(handle, LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(error.errno, error.strerror) from None
        finally:
            os.lseek(handle, before, os.SEEK_SET)
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock_file(handle: int) -> None:
    """Release the lock of `lock_file` before the file is closed."""
    if sys.platform == "win32":
        before = os.lseek(handle, 0, os.SEEK_CUR)
        os.lseek(handle, LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_UNLCK, 1)
        os.lseek(handle, before, os.SEEK_SET)
    else:
        fcntl.flock(handle, fcntl.LOCK_UN)


def read_at(handle: int, nbytes: int, offset: int) -> bytes:
    """Read bytes of a file that is opened for appending."""
    if sys.platform != "win32":
        return os.pread(handle, nbytes, offset)
    os.lseek(handle, offset, os.SEEK_SET)
    return os.read(handle, nbytes)


def is_private(found: os.stat_result) -> bool:
    """Whether only this user (and the administrator) can read a file, by its mode and owner.

    Always true on Windows, where a file inherits the access list of its folder: keep secrets in your profile's.
    """
    if sys.platform == "win32":
        return True
    return not stat.S_IMODE(found.st_mode) & 0o077 and found.st_uid in (os.geteuid(), 0)


# -- sockets -----------------------------------------------------------------------------------------------------------


def reuse_address(listener: socket.socket) -> None:
    """Allow to listen at a port of connections that have just ended. On Windows, the option would allow a second
    process to listen there, and ended connections do not block a port."""
    if sys.platform == "win32":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
    else:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def share_port(sock: socket.socket) -> None:
    """Allow a listening socket and dialing sockets of this user at one port. Raises OSError where it is impossible."""
    if sys.platform == "win32":
        raise OSError("Windows does not let a dialing socket share a port with a listening one")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


# Sends the beginning of several buffers in one call, and returns the number of bytes. Called for every message
if sys.platform == "win32":

    def send_some(connection: socket.socket, buffers: Sequence[memoryview]) -> int:
        return connection.send(buffers[0])
else:
    send_some = socket.socket.sendmsg


# For reads and writes that return at once. Only connections of compiled loops need it, which Windows does not have
if sys.platform == "win32":
    DONT_WAIT = 0
else:
    DONT_WAIT = socket.MSG_DONTWAIT


# -- resources ---------------------------------------------------------------------------------------------------------


def cores() -> int:
    """Number of cores that this process may use, as far as the system reports it."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Memory of this machine."""
    if sys.platform == "win32":
        return int(psutil.virtual_memory().total)
    return os.sysconf("SC_PHYS_PAGES") * page_bytes()


@cache
def has_aes() -> bool:
    """Whether this processor is known to have AES instructions."""
    if sys.platform == "darwin":
        return True
    try:
        return "aes" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False


def page_bytes() -> int:
    """Bytes of a page of memory, the unit of counters in /proc."""
    if sys.platform == "win32":
        return 4096
    return os.sysconf("SC_PAGE_SIZE")


def clock_ticks_per_second() -> int:
    """The unit of counters in /proc."""
    if sys.platform == "win32":
        return 100
    return os.sysconf("SC_CLK_TCK")


def peak_resident_bytes() -> int:
    """Most memory that this process had in use."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    else:
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else largest * 1024


def load_average() -> float:
    """Processes that use or wait for a core, averaged over the last minute."""
    if sys.platform == "win32":
        return float(psutil.getloadavg()[0])
    return os.getloadavg()[0]


def open_file_limits() -> tuple[float, float]:
    """Limit of open files of this process, and the limit up to which it may be raised; infinity for no limit."""
    if sys.platform == "win32":
        return float("inf"), float("inf")  # sockets are no files there
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return _limit(soft), _limit(hard)


def raise_open_file_limit(wanted: int) -> float:
    """Raise the limit of open files to `wanted`, as far as the system allows. Return the limit."""
    soft, hard = open_file_limits()
    allowed = min(wanted, hard)
    if sys.platform != "win32" and soft < allowed:
        with suppress(OSError, ValueError):
            unchanged = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (int(allowed), unchanged))
            return allowed
    return soft


if sys.platform != "win32":

    def _limit(number: int) -> float:
        return float("inf") if number == resource.RLIM_INFINITY else float(number)
