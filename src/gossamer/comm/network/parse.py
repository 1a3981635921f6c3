"""Network parser: `100mbit,20ms,loss=0.1%`, or a TOML file if hosts differ."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path as File
from typing import Any

from gossamer.base import bounded_file
from gossamer.base.json_text import DEEPEST_LEVELS, nesting
from gossamer.base.units import BITS_PER_SECOND as BITS_PER_SECOND
from gossamer.comm.network.model import Host, Network, Path
from gossamer.errors import GossamerError

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MOST_HOSTS = 100_000  # per description
MOST_BYTES, MOST_DOTS = 2**22, 200  # of a file, and of one of its lines
SHOWN_CHARACTERS = 100  # of invalid input in messages
UNLIMITED_BITS_PER_SECOND = 100e9
HOST_KEYS = {"count", "site", "rate", "up", "down"}
DEFAULT_KEYS = {"round_trip", "jitter", "loss"}
PATH_KEYS = DEFAULT_KEYS | {"between", "rate"}


class NetworkError(GossamerError, ValueError):
    """A network description is invalid, or has too few hosts."""


def read_network(text: str, workers: int) -> Network:
    """Parse a network with a host for each worker.

    Args:
        text: A SPEC or the name of a TOML file. SPEC is RATE[,ROUND_TRIP][,jitter=TIME][,loss=SHARE][,up=RATE]
            [,down=RATE], per host and direction; RATE may be `unlimited`. `up` and `down` are limits of a direction.
        workers: Number of workers.

    Raises:
        NetworkError: The description is invalid, or has too few hosts.
    """
    network = _from_toml(File(text)) if text.endswith(".toml") else _from_spec(text, workers)
    if len(network.hosts) < workers:
        raise NetworkError(
            f"{text} has {len(network.hosts)} hosts, but {workers} workers need one each. Add hosts to it, or run "
            f"--workers {len(network.hosts)}."
        )
    return Network(hosts=network.hosts[:workers], default=network.default, paths=network.paths, text=text)


def _from_spec(text: str, workers: int) -> Network:
    rate, *rest = [part.strip() for part in text.lower().split(",")]
    options: dict[str, str] = {}
    for part in rest:
        key, equals, value = part.partition("=")
        options[key if equals else "round_trip"] = value if equals else part
    if unknown := options.keys() - {"round_trip", "jitter", "loss", "up", "down"}:
        named = ", ".join(sorted(unknown))[:SHOWN_CHARACTERS]
        raise NetworkError(
            f"{named} is not part of a network: RATE[,ROUND_TRIP][,jitter=TIME][,loss=SHARE][,up=RATE][,down=RATE], "
            "such as 20mbit,80ms,loss=0.1%."
        )
    bits = _rate(rate)
    up, down = (min(bits, _rate(options.pop(way, rate))) for way in ("up", "down"))
    host = _checked(Host, up_bits_per_second=up, down_bits_per_second=down)
    return Network(hosts=(host,) * workers, default=_path(options))


def _from_toml(file: File) -> Network:
    try:
        table = tomllib.loads(_read_text(file))
    except (OSError, ValueError, MemoryError) as error:  # ValueError: invalid text, TOML or numbers
        what = str(error)[:SHOWN_CHARACTERS] or type(error).__name__
        raise NetworkError(f"{str(file)[:SHOWN_CHARACTERS]} cannot be read as a network: {what}") from error
    if unknown := table.keys() - {"hosts", "paths", "default"}:
        raise NetworkError(f"{file} has unknown keys {sorted(unknown)}: use [[hosts]], [[paths]] and [default].")
    default = _table(table.get("default", {}), "[default]", file)
    if unknown := default.keys() - DEFAULT_KEYS - {"rate"}:  # Network rejects `rate` with its reason
        raise NetworkError(f"{file}: [default] has unknown keys {sorted(unknown)}: use {sorted(DEFAULT_KEYS)}")
    hosts = [host for entry in _tables(table, "hosts", file) for host in _hosts(entry, file)]
    sites, paths = {host.site for host in hosts}, dict[frozenset[str], Path]()
    for entry in _tables(table, "paths", file):
        ends, path = _between(entry, sites, file)
        if ends in paths:
            raise NetworkError(f"{file}: {sorted(ends)} have two paths, but a pair of sites has one. Remove one.")
        paths[ends] = path
    network: Network = _checked(Network, hosts=tuple(hosts), default=_path(default), paths=paths)
    return network


def _read_text(file: File) -> str:
    """Read a file's text. The memory of a TOML parser for a key grows with the square of its dots."""
    try:
        text = bounded_file.read_text(file, MOST_BYTES)
    except UnicodeDecodeError:
        raise
    except ValueError:
        raise ValueError(f"it has more than {MOST_BYTES} bytes. Give the number of equal hosts: count = 100") from None
    if any(line.count(".") > MOST_DOTS for line in text.splitlines()):
        raise ValueError(f"a line has more than {MOST_DOTS} dots. Write hosts and paths on separate lines")
    if nesting(text) > DEEPEST_LEVELS:
        raise ValueError("its brackets nest too deeply. Write hosts and paths as tables: [[hosts]]")
    return text


def _tables(table: Mapping[str, Any], name: str, file: File) -> Sequence[Mapping[str, Any]]:
    entries = table.get(name, [])
    if not isinstance(entries, list):
        raise NetworkError(f"{file}: {name} must be a list of tables. Write [[{name}]], in double brackets.")
    return [_table(entry, f"[[{name}]]", file) for entry in entries]


def _table(entry: object, heading: str, file: File) -> Mapping[str, Any]:
    if not isinstance(entry, dict):
        raise NetworkError(f"{file}: {heading} must be a table, with lines such as `rate = ...`, got {entry!r}")
    return entry


def _hosts(entry: Mapping[str, Any], file: File) -> Sequence[Host]:
    if unknown := entry.keys() - HOST_KEYS:
        raise NetworkError(f"{file}: hosts have unknown keys {sorted(unknown)}: use {sorted(HOST_KEYS)}")
    up, down = entry.get("up", entry.get("rate")), entry.get("down", entry.get("rate"))
    if up is None or down is None:
        raise NetworkError(f'{file}: a host needs `rate = "1gbit"`, or `up` and `down`: {dict(entry)}')
    host = _checked(
        Host, up_bits_per_second=_rate(up), down_bits_per_second=_rate(down), site=str(entry.get("site", ""))
    )
    count = entry.get("count", 1)
    if type(count) is not int or not 1 <= count <= MOST_HOSTS:
        raise NetworkError(f"{file}: count is the number of equal hosts, from 1 to {MOST_HOSTS}, got {count!r}")
    return (host,) * count


def _between(entry: Mapping[str, Any], sites: set[str], file: File) -> tuple[frozenset[str], Path]:
    ends: Any = entry.get("between")
    if unknown := entry.keys() - PATH_KEYS:
        raise NetworkError(f"{file}: paths have unknown keys {sorted(unknown)}: use {sorted(PATH_KEYS)}")
    named = isinstance(ends, list) and all(isinstance(end, str) and end in sites for end in ends)
    if not named or len(ends) not in (1, 2):
        raise NetworkError(f"{file}: a path must be between one or two of the sites {sorted(sites)}, got {ends!r}")
    return frozenset(ends), _path({key: value for key, value in entry.items() if key != "between"})


def _path(options: Mapping[str, str]) -> Path:
    rate = options.get("rate", "unlimited")
    path: Path = _checked(
        Path,
        round_trip_seconds=_quantity(options.get("round_trip", "0s"), SECONDS, "a time", "20ms"),
        jitter_seconds=_quantity(options.get("jitter", "0s"), SECONDS, "a time", "2ms"),
        loss=_share(options.get("loss", "0%")),
        bits_per_second=None if rate == "unlimited" else _rate(rate),
    )
    return path


def _rate(text: str) -> float:
    if text == "unlimited":
        return UNLIMITED_BITS_PER_SECOND
    return _quantity(text, BITS_PER_SECOND, "a rate", "100mbit")


def _share(text: str) -> float:
    number = str(text).removesuffix("%")
    if not re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", number):
        raise NetworkError(f"{shown(text)} is not a fraction of packets. Write loss=0.1%.")
    return float(number) / (100 if str(text).endswith("%") else 1)


def _quantity(text: str, units: Mapping[str, float], what: str, example: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", str(text).strip().lower())
    if not found or found[2] not in units:
        raise NetworkError(
            f"{shown(text)} is not {what}. Write a number and one of {', '.join(units)}, such as {example}."
        )
    quantity = float(found[1]) * units[found[2]]
    if not isfinite(quantity):
        raise NetworkError(f"{shown(text)} is out of range. Write {what} such as {example}.")
    return quantity


def shown(value: object) -> str:
    """Format a value, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _checked(noun: Any, **fields: Any) -> Any:
    try:
        return noun(**fields)
    except ValueError as error:
        raise NetworkError(str(error)) from error
