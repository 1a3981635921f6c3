"""A process in which Gossamer sees another operating system: macOS or Windows, named by GOSSAMER_TEST_SYSTEM.

Gossamer's modules import views of the standard library: calls that typeshed does not list for that system are missing,
sys.platform is that system's, and some calls behave as they do there. All other packages see the real modules.
psutil is the real one; msvcrt locks by fcntl.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import fcntl
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

SYSTEM = os.environ["GOSSAMER_TEST_SYSTEM"]  # darwin or win32
VIEWED = ("ctypes", "faulthandler", "mmap", "os", "select", "signal", "socket", "sys", "threading", "time")
ABSENT = {
    "darwin": ("nt", "msvcrt", "winreg"),
    "win32": ("fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"),
}
F_FULLFSYNC = 51  # of macOS
TEXT_MODE = 0x8000  # O_BINARY, which os.open needs on Windows
WINDOWS_SIGNALS = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM"}

real_import = builtins.__import__


# -- the names of a system ---------------------------------------------------------------------------------------------


def stub(name: str) -> ast.Module:
    found = importlib.util.find_spec("mypy")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent / "typeshed/stdlib"
    places = (folder / f"{name}.pyi", folder / name / "__init__.pyi")
    return ast.parse(next(place for place in places if place.exists()).read_text(encoding="utf-8"))


def is_true(test: ast.expr) -> bool:
    """Of a condition in a stub: of the platform and the version only."""
    text = ast.unparse(test).replace("sys.platform", "SYSTEM").replace("sys.version_info", "VERSION")
    return bool(eval(text, {"SYSTEM": SYSTEM, "VERSION": sys.version_info[:3]}))


def names(statements: Sequence[ast.stmt]) -> Iterator[str]:
    for each in statements:
        match each:
            case ast.If(test, body, orelse):
                yield from names(body if is_true(test) else orelse)
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield name
            case ast.AnnAssign(ast.Name(name)):
                yield name
            case ast.Assign(targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.Import(aliases) | ast.ImportFrom(_, aliases):
                yield from (alias.asname or alias.name for alias in aliases)


# -- views -------------------------------------------------------------------------------------------------------------


class View(ModuleType):
    """A module without the names that the system lacks. replaced: names with another value there."""

    def __init__(self, name: str, replaced: Mapping[str, Any]) -> None:
        known = set(names(stub(name).body))
        real = import_module(name)
        hidden = {each for each in dir(real) if not each.startswith("_") and each not in known} - set(replaced)
        for key, value in (("_real", real), ("_hidden", hidden), ("_replaced", replaced), ("__name__", name)):
            object.__setattr__(self, key, value)

    def __getattribute__(self, name: str) -> Any:
        inner = object.__getattribute__(self, "__dict__")
        if name in inner["_replaced"]:
            return inner["_replaced"][name]
        if name in inner["_hidden"]:
            raise AttributeError(f"module {inner['__name__']!r} has no attribute {name!r} on {SYSTEM}")
        return getattr(inner["_real"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "__dict__")["_real"], name, value)


def os_open(path: Any, flags: int, mode: int = 0o777) -> int:
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    if not flags & TEXT_MODE:
        raise AssertionError(f"os.open of {path} without O_BINARY: it would change line ends")
    return os.open(path, flags & ~TEXT_MODE, mode)


def os_kill(pid: int, number: int) -> None:
    if number != signal.SIGTERM:
        raise AssertionError(f"os.kill({pid}, {number}) ends the process on Windows")
    os.kill(pid, signal.SIGKILL)


def set_handler(number: int, handler: Any) -> Any:
    if signal.Signals(number).name not in WINDOWS_SIGNALS:
        raise ValueError("invalid signal value")
    return signal.signal(number, handler)


def locking(handle: int, mode: int, nbytes: int) -> None:
    """At the current position of a file, as msvcrt's; it raises PermissionError where another process has the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_UN if mode == 0 else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PermissionError(13, "Permission denied") from error


def load_library(name: Any, *arguments: Any, **options: Any) -> Any:
    if "gossamer" in str(name):
        raise OSError("no such library on Windows")
    return ctypes.CDLL(name, *arguments, **options)


def full_sync(handle: Any, command: int, argument: Any = 0) -> Any:
    return os.fsync(handle) if command == F_FULLFSYNC else fcntl.fcntl(handle, command, argument)


def windows_psutil() -> ModuleType:
    """psutil, with the counter of Windows that it lacks elsewhere."""
    import psutil

    class Process(psutil.Process):
        def memory_info(self) -> Any:
            return SimpleNamespace(peak_wset=super().memory_info().rss)

    found = ModuleType("psutil")
    for name in ("Error", "getloadavg", "virtual_memory"):
        setattr(found, name, getattr(psutil, name))
    found.Process = Process  # type: ignore[attr-defined]
    return found


def replaced() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {name: {} for name in VIEWED}
    found["sys"] = {"platform": SYSTEM}
    if SYSTEM == "darwin":
        found["fcntl"] = {"F_FULLFSYNC": F_FULLFSYNC, "fcntl": full_sync}
    else:
        found["os"] = {"name": "nt", "O_BINARY": TEXT_MODE, "open": os_open, "kill": os_kill}
        found["signal"] = {"signal": set_handler}
        found["ctypes"] = {"CDLL": load_library}
        found["socket"] = {"SO_EXCLUSIVEADDRUSE": 2}  # SO_REUSEADDR here
    return found


views: dict[str, ModuleType] = {name: View(name, each) for name, each in replaced().items()}
if SYSTEM == "win32":
    views["psutil"] = windows_psutil()
    views["msvcrt"] = msvcrt = ModuleType("msvcrt")
    msvcrt.locking, msvcrt.LK_UNLCK, msvcrt.LK_NBLCK = locking, 0, 2  # type: ignore[attr-defined]


def import_here(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:  # noqa: A002
    if level or str((globals or {}).get("__name__")).partition(".")[0] != "gossamer":
        return real_import(name, globals, locals, fromlist, level)
    if name.partition(".")[0] in ABSENT[SYSTEM]:
        raise ModuleNotFoundError(f"No module named {name!r} on {SYSTEM}", name=name)
    if name in views:
        return views[name]
    found = real_import(name, globals, locals, fromlist, level)
    return found if fromlist else views.get(name.partition(".")[0], found)


builtins.__import__ = import_here
if "eager" in os.environ.get("PYTHONPATH", ""):  # of the suite's other processes
    eager = Path(__file__).parents[1] / "eager" / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("eager_sitecustomize", eager)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
