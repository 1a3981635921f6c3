"""Network parser: `100mbit,20ms,loss=0.1%`, or a TOML file if hosts differ."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path as File
from typing import Any

from gossamer.base import bounded_file
from gossamer.base.json_text import DEEPEST_LEVELS, nesting
from gossamer.base.units import SHOWN_CHARACTERS, parse_rate, parse_seconds, shown
from gossamer.comm.network.model import Host, Network, Path
from gossamer.errors import GossamerError

MOST_HOSTS = 100_000  # per description
MOST_RELAYED_HOSTS = 512  # per description with relays, which are stored for each pair
MOST_BYTES, MOST_DOTS = 2**22, 200  # of a file, and of one of its lines
UNLIMITED_BITS_PER_SECOND = 100e9
HOST_KEYS = {"count", "site", "rate", "up", "down"}
DEFAULT_KEYS = {"round_trip", "jitter", "loss"}
PATH_KEYS = DEFAULT_KEYS | {"between", "rate"}
RELAY_KEYS = {"between", "through", "rate", "up", "down"}


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
    return replace(network.among(range(workers)), text=text)


def _from_spec(text: str, workers: int) -> Network:
    rate, *rest = [part.strip() for part in text.lower().split(",")]
    options: dict[str, str] = {}
    for part in rest:
        key, equals, value = part.partition("=")
        key, value = (key, value) if equals else ("round_trip", part)
        if key in options:
            raise NetworkError(
                f"the network has two values of {shown(key)}: {shown(options[key])} and {shown(value)}. Only the round "
                "trip has no name: 20mbit,80ms,jitter=2ms."
            )
        options[key] = value
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
    if unknown := table.keys() - {"hosts", "paths", "relays", "default"}:
        raise NetworkError(
            f"{file} has unknown keys {sorted(unknown)}: use [[hosts]], [[paths]], [[relays]] and [default]."
        )
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
    relays, relayed = _relays(_tables(table, "relays", file), hosts, file)
    network: Network = _checked(
        Network, hosts=tuple(hosts), default=_path(default), paths=paths, relays=relays, relayed=relayed
    )
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
    host, count = _host(entry, "host", file), entry.get("count", 1)
    if type(count) is not int or not 1 <= count <= MOST_HOSTS:
        raise NetworkError(f"{file}: count is the number of equal hosts, from 1 to {MOST_HOSTS}, got {count!r}")
    return (host,) * count


def _host(entry: Mapping[str, Any], what: str, file: File) -> Host:
    up, down = entry.get("up", entry.get("rate")), entry.get("down", entry.get("rate"))
    if up is None or down is None:
        raise NetworkError(f'{file}: a {what} needs `rate = "1gbit"`, or `up` and `down`: {dict(entry)}')
    host: Host = _checked(
        Host, up_bits_per_second=_rate(up), down_bits_per_second=_rate(down), site=str(entry.get("site", ""))
    )
    return host


def _between(entry: Mapping[str, Any], sites: set[str], file: File) -> tuple[frozenset[str], Path]:
    ends: Any = entry.get("between")
    if unknown := entry.keys() - PATH_KEYS:
        raise NetworkError(f"{file}: paths have unknown keys {sorted(unknown)}: use {sorted(PATH_KEYS)}")
    if not _are_sites(ends, sites) or len(ends) not in (1, 2):
        raise NetworkError(f"{file}: a path must be between one or two of the sites {sorted(sites)}, got {ends!r}")
    return frozenset(ends), _path({key: value for key, value in entry.items() if key != "between"})


def _are_sites(ends: Any, sites: Collection[str]) -> bool:
    return isinstance(ends, list) and all(isinstance(end, str) and end in sites for end in ends)


def _relays(
    entries: Sequence[Mapping[str, Any]], hosts: Sequence[Host], file: File
) -> tuple[tuple[Host, ...], dict[frozenset[int], int]]:
    """Return the relays on machines of their own, and the relay of each pair of hosts, as in Network.

    A relay connects hosts of different sites in `between`, and hosts of one site if it is listed twice or alone.
    """
    if entries and len(hosts) > MOST_RELAYED_HOSTS:
        raise NetworkError(
            f"{file}: a network with [[relays]] has at most {MOST_RELAYED_HOSTS} hosts, got {len(hosts)}. Describe "
            "fewer hosts."
        )
    members: dict[str, list[int]] = {}
    for number, host in enumerate(hosts):
        members.setdefault(host.site, []).append(number)
    relays, relayed = list[Host](), dict[frozenset[int], int]()
    for entry in entries:
        through = _relay_site(entry, members, file)
        ends: Any = entry.get("between")
        if not _are_sites(ends, members) or not ends or through in ends:
            but = "" if through is None else f", without {through!r}, which relays"
            raise NetworkError(
                f"{file}: a relay must be between some of the sites {sorted(members)}{but}, got {ends!r}. Write "
                'between = ["home 1", "home 2"], or a site twice for the pairs of its own hosts.'
            )
        if through is None:
            relays.append(_host(entry, "relay without `through`", file))
        number = members[through][0] if through is not None else len(hosts) + len(relays) - 1
        for pair in _pairs(ends, members):
            if pair in relayed:
                named = sorted({hosts[each].site for each in pair})
                raise NetworkError(f"{file}: hosts of {named} have two relays, but a pair has one. Remove one.")
            relayed[pair] = number
    return tuple(relays), relayed


def _pairs(ends: Sequence[str], members: Mapping[str, Sequence[int]]) -> Iterator[frozenset[int]]:
    """Pairs of hosts of two of these sites, and of one that is listed twice or alone."""
    for site, times in Counter(ends).items():
        if times > 1 or len(ends) == 1:
            yield from map(frozenset, combinations(members[site], 2))
    for one, other in combinations(dict.fromkeys(ends), 2):
        yield from map(frozenset, product(members[one], members[other]))


def _relay_site(entry: Mapping[str, Any], sites: Collection[str], file: File) -> str | None:
    """Return the site whose first host relays; None for a machine of its own."""
    if unknown := entry.keys() - RELAY_KEYS:
        raise NetworkError(f"{file}: relays have unknown keys {sorted(unknown)}: use {sorted(RELAY_KEYS)}")
    through: Any = entry.get("through")
    if through is None:
        return None
    if not _are_sites([through], sites):
        raise NetworkError(
            f"{file}: a relay must be through one of the sites {sorted(sites)}, got {through!r}. The first host of "
            'that site relays; for a machine without a worker write rate = "1gbit" instead.'
        )
    if given := entry.keys() & {"rate", "up", "down"}:
        raise NetworkError(
            f"{file}: a relay through {through!r} has the line of that host: remove {sorted(given)}, or `through` for "
            "a machine without a worker."
        )
    return str(through)


def _path(options: Mapping[str, str]) -> Path:
    rate = options.get("rate", "unlimited")
    path: Path = _checked(
        Path,
        round_trip_seconds=_checked(parse_seconds, text=options.get("round_trip", "0s")),
        jitter_seconds=_checked(parse_seconds, text=options.get("jitter", "0s")),
        loss=_share(options.get("loss", "0%")),
        bits_per_second=None if rate == "unlimited" else _rate(rate),
    )
    return path


def _rate(text: str) -> float:
    if text == "unlimited":
        return UNLIMITED_BITS_PER_SECOND
    bits_per_second: float = _checked(parse_rate, text=text)
    return bits_per_second


def _share(text: str) -> float:
    number = str(text).removesuffix("%")
    if not re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", number):
        raise NetworkError(f"{shown(text)} is not a fraction of packets. Write loss=0.1%.")
    return float(number) / (100 if str(text).endswith("%") else 1)


def _checked(make: Any, **fields: Any) -> Any:
    try:
        return make(**fields)
    except ValueError as error:
        raise NetworkError(str(error)) from error
