"""`gossamer doctor LINK`: how this machine would reach the run of a link and each of its workers."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from gossamer.base.host_port import Address, is_loopback
from gossamer.base.units import counted, seconds_text
from gossamer.cli.console import progress, table
from gossamer.comm.elastic.invited import (
    NEEDS_TLS,
    AddressCheck,
    MemberCheck,
    check_addresses,
    check_members,
    no_address,
)
from gossamer.comm.membership.invitations import JoinLink
from gossamer.comm.tls_contexts import Tls
from gossamer.errors import ConnectError
from gossamer.observe.control_sequences import SafeConsole
from gossamer.version import __version__

PUNCHED = "probably directly, by hole punching"
REMEDY = (
    "Start the run with --relay, so that its first machine forwards their traffic. Or join the machines by a VPN such "
    "as WireGuard or Tailscale, and start every launcher with --interface NAME, the interface of the VPN"
)


class Router(StrEnum):
    """Kind of router between two machines, by the address that it gives to a listening port."""

    NONE = "no router"
    KEEPS = "keeps the number of a port"
    CHANGES = "changes the number of a port"


@dataclass(frozen=True)
class LinkReport:
    """What one machine found.

    run: of the link; members, relays: empty if no address answers. The coordinator is not among the relays.
    """

    run: str
    addresses: tuple[AddressCheck, ...]
    members: tuple[MemberCheck, ...]
    relays: tuple[MemberCheck, ...] = ()

    @property
    def router(self) -> Router:
        """The router of this machine."""
        return router_between([(each.own, each.seen_as) for each in self.addresses if each.own and each.seen_as])

    def way_to(self, member: MemberCheck) -> str:
        """How workers of this machine would be connected to a worker of the run; empty if not at all."""
        if member.reached is not None:
            first = member.reached == member.addresses[0]
            return "directly" if first else "directly, at {}:{}".format(*member.reached)
        if Router.CHANGES not in (self.router, router_of(member)) and not is_loopback(member.addresses[0][0]):
            return PUNCHED
        relays = self.entrance is not None and self.entrance.relays
        return f"by the relay ({member.problem})" if relays else ""

    @property
    def entrance(self) -> AddressCheck | None:
        """The fastest address at which the coordinator accepts the link."""
        usable = [each for each in self.addresses if not each.problem and not each.refused]
        return min(usable, key=lambda each: each.seconds, default=None)

    @property
    def nearest_relay(self) -> str:
        """The address of the relay that this machine reaches fastest; "" if the run has none."""
        relays = [(each.seconds, "{}:{}".format(*each.reached)) for each in self.relays if each.reached]
        if self.entrance is not None and self.entrance.relays:
            relays.append((self.entrance.seconds, self.entrance.name))
        return min(relays, default=(0.0, ""))[1]

    @property
    def healthy(self) -> bool:
        return self.entrance is not None and all(map(self.way_to, self.members))


def router_between(pairs: Sequence[tuple[Address, Address]]) -> Router:
    """The router of a machine. pairs: an own address, and the same as another machine sees it."""
    if not any(is_translated(own[0], seen[0]) for own, seen in pairs):
        return Router.NONE
    return Router.KEEPS if all(own[1] == seen[1] for own, seen in pairs) else Router.CHANGES


def router_of(member: MemberCheck) -> Router:
    """The router of a worker, by the address from which it is connected to the coordinator."""
    first, *others = member.addresses
    return router_between([(first, each) for each in others if (":" in each[0]) == (":" in first[0])])


def examine(link: JoinLink, tls: Tls | None) -> LinkReport:
    """Try all addresses of a link, and then all workers of its run. Raises ConnectError for a missing --tls."""
    if link.encrypted and tls is None:
        raise ConnectError(NEEDS_TLS)
    with progress("connecting") as show_line:
        addresses = tuple(check_addresses(link, tls))
        first = LinkReport(link.run, addresses, ()).entrance
        if first is None:
            return LinkReport(link.run, addresses, ())
        show_line(f"connecting to {counted(len(first.members), 'worker')}")
        found = check_members([*first.members, *((each,) for each in first.other_relays)])
        count = len(first.members)
        return LinkReport(link.run, addresses, tuple(found[:count]), tuple(found[count:]))


def show(report: LinkReport, json_file: Path | None, console: Console | None = None) -> None:
    """Print two tables and the advice, and write the report as JSON."""
    console = console or SafeConsole(highlight=False)
    shown = table(("address of the run", "connects in", "result"), left=("address of the run", "result"))
    for address in report.addresses:
        problem = address.problem or address.refused
        style = "red" if problem else None
        shown.add_row(Text(address.name), _seconds(address), Text(problem or address.status), style=style)
    console.print(shown)
    if report.members:
        shown = table(("worker", "connects in", "how"), left=("worker", "how"))
        for rank, member in enumerate(report.members):
            way = report.way_to(member)
            name = "{} at {}:{}".format(rank, *member.addresses[0])
            shown.add_row(
                Text(name), _seconds(member), Text(way or f"not at all: {member.problem}"), style=None if way else "red"
            )
        console.print()
        console.print(shown)
    if report.relays:
        shown = table(("relay", "connects in", "result"), left=("relay", "result"))
        for relay in report.relays:
            shown.add_row(Text("{}:{}".format(*relay.addresses[0])), _seconds(relay), Text(relay.problem or "reached"))
        console.print()
        console.print(shown)
    console.print()
    for sentence in advice(report):
        console.print(Text(sentence, style="bold" if report.healthy else "bold red"), soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(_record(report), indent=1) + "\n", encoding="utf-8")


def advice(report: LinkReport) -> Iterator[str]:
    """The sentences below the tables: whether joining would succeed, and what to do if not."""
    entrance = report.entrance
    if entrance is None:
        refused = [each.refused for each in report.addresses if each.refused]
        yield refused[0] if refused else no_address(report.run, report.addresses)
        return
    count, ways = len(report.members), [report.way_to(member) for member in report.members]
    if not all(ways):
        yield (
            f"{ways.count('')} of {count} workers cannot be reached from this machine, so workers here could not join. "
            f"Workers listen on ports that the system chooses. {REMEDY}"
        )
    elif relayed := [way for way in ways if "relay" in way]:
        yield (
            f"{len(relayed)} of {count} workers are reached by the relay at {report.nearest_relay} only, and share the "
            "bandwidth of its machine: gossamer join LINK SCRIPT"
        )
    elif PUNCHED in ways:
        yield (
            f"{ways.count(PUNCHED)} of {count} workers can probably be reached by hole punching: the routers keep the "
            f"numbers of ports. If joining fails: {REMEDY}"
        )
    elif report.members:
        them = "The worker" if count == 1 else f"All {count} workers"
        yield f"{them} can be reached from this machine: gossamer join LINK SCRIPT"
    else:
        yield "The run can be reached from this machine, and has no workers yet: gossamer join LINK SCRIPT"
    if report.router is Router.CHANGES and not entrance.relays and entrance.own and entrance.seen_as:
        own, seen = ("{}:{}".format(*each) for each in (entrance.own, entrance.seen_as))
        yield (
            f"This machine's address {own} appears as {seen} at the run: a router is in between, which changes the "
            "numbers of ports, so workers behind other routers or firewalls cannot connect to those of this machine. "
            f"{REMEDY}"
        )


def is_translated(own: str, seen: str) -> bool:
    """Whether a router translated this machine's address. An IPv4 address may appear as an IPv6 one."""
    if not own or not seen:
        return False
    return _plain(own) != _plain(seen)


def _plain(text: str) -> object:
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def _seconds(check: AddressCheck | MemberCheck) -> str:
    return "-" if check.problem or not check.seconds else seconds_text(check.seconds)


def _record(report: LinkReport) -> dict[str, Any]:
    """The report without the link, as JSON."""
    return {
        "gossamer": __version__,
        "healthy": report.healthy,
        "addresses": _records(report.addresses),
        "router": report.router,
        "relays": [asdict(each) for each in report.relays],
        "workers": [asdict(each) | {"way": report.way_to(each)} for each in report.members],
        "advice": list(advice(report)),
    }


def _records(checks: Sequence[AddressCheck]) -> list[dict[str, Any]]:
    return [asdict(each) | {"address": each.name} for each in checks]
