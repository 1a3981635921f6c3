"""Homes behind routers with real address translation, and an office with one open port, as network namespaces.

The office has a public address and a firewall that accepts new connections to one port only. Each home has a machine
with the same private address behind a router of one kind (RFC 3489), by nftables. All routers and the office are on one
bridge, the internet.

    kind          address that the router gives to a port     accepts from outside
    full cone     the same towards every destination          everything to that address
    address       the same                                    hosts to which the machine has sent
    port          the same                                    addresses to which the machine has sent
    symmetric     another one for every destination           addresses to which the machine has sent
    carrier       of kind "port", behind a second router of that kind
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gossamer.plan.emulation.namespaces import DIRECTORY, EmulationError, call, ip

OFFICE, PORT = "203.0.113.1", 29700
PRIVATE = "192.168.1.5"

OFFICE_RULES = f"""
table inet filter {{
  chain input {{
    type filter hook input priority 0; policy drop;
    iif lo accept
    ct state established,related accept
    tcp dport {PORT} accept
  }}
}}
"""
FULL_CONE, ADDRESS, PORT_ONLY, SYMMETRIC, CARRIER = KINDS = ("full cone", "address", "port", "symmetric", "carrier")
TRANSLATIONS = {FULL_CONE: "", ADDRESS: "", PORT_ONLY: "", SYMMETRIC: "random", CARRIER: ""}
ADMISSIONS = {
    FULL_CONE: f'iifname "wan" tcp dport >= 1024 dnat to {PRIVATE};',
    ADDRESS: f'iifname "wan" ip saddr @contacted tcp dport >= 1024 dnat to {PRIVATE};',
}
ROUTER_RULES = """
table ip nat {
  set contacted { type ipv4_addr; flags dynamic; timeout 1m; }
  chain outgoing { type filter hook forward priority -1; iifname "lan" update @contacted { ip daddr }; }
  chain prerouting { type nat hook prerouting priority -100; ADMISSION }
  chain postrouting { type nat hook postrouting priority 100; oifname "wan" masquerade TRANSLATION; }
}
table inet filter {
  chain forward {
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    ct status dnat accept
    iifname "lan" accept
  }
  chain input {
    type filter hook input priority 0; policy drop;
    ct state established,related accept
    meta l4proto ipv6-icmp accept
  }
}
"""


def missing() -> str:
    """Why this machine cannot build it; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    return "" if shutil.which("nft") else "address translation needs nftables (apt-get install nftables)"


class Internet:
    """An office, and homes behind routers of these kinds. prefix: begins the command line of a program on a machine."""

    def __init__(self, kinds: Sequence[str]) -> None:
        machines = ["internet", "office"]
        for home, kind in enumerate(kinds, 1):
            machines += [f"router{home}", f"home{home}", *[f"carrier{home}"] * (kind == CARRIER)]
        self._names = [self.name(machine) for machine in machines]
        self._kinds = kinds

    def name(self, machine: str) -> str:
        return f"reach-{os.getpid()}-{machine}"

    def path(self, machine: str) -> Path:
        return DIRECTORY / self.name(machine)

    def prefix(self, machine: str) -> tuple[str, ...]:
        return ("nsenter", f"--net={self.path(machine)}", "--")

    def build(self) -> None:
        for name in self._names:
            call(("ip", "netns", "add", name))
            ip(name, ["link set lo up"])
        internet = self.name("internet")
        ip(internet, ["link add br0 type bridge", "link set br0 up"])
        self._plug("office", 0, OFFICE)
        for home, kind in enumerate(self._kinds, 1):
            outside = f"carrier{home}" if kind == CARRIER else f"router{home}"
            self._plug(outside, home, f"203.0.113.{10 + home}")
            if kind == CARRIER:
                self._route(outside, kind, f"router{home}", "wan", "100.64.0")
            self._route(f"router{home}", kind, f"home{home}", "eth0", "192.168.1")
        self._in("office", "nft", "-f", "-", text=OFFICE_RULES)

    def _route(self, router: str, kind: str, inside: str, interface: str, net: str) -> None:
        """Make a machine a router of this kind, and connect the machine behind it."""
        name, host = self.name(router), self.name(inside)
        link = f"link add lan type veth peer name {interface} netns {host}"
        ip(name, [link, f"addr add {net}.1/24 dev lan", "link set lan up"])
        up = [f"addr add {net}.5/24 dev {interface}", f"link set {interface} up", f"route add default via {net}.1"]
        ip(host, up)
        self._in(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        self._in(router, "nft", "-f", "-", text=self.rules(kind))

    def rules(self, kind: str) -> str:
        """The configuration of nft of a router of this kind, whose outer interface is "wan"."""
        return ROUTER_RULES.replace("TRANSLATION", TRANSLATIONS[kind]).replace("ADMISSION", ADMISSIONS.get(kind, ""))

    def add_ipv6(self) -> None:
        """Give every home a public IPv6 address, which its router does not translate."""
        count = len(self._kinds)
        for home in range(1, count + 1):
            others = [other for other in range(1, count + 1) if other != home]
            self._in(f"router{home}", "sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")
            ip(
                self.name(f"router{home}"),
                [
                    f"addr add 2001:db8::{home}/64 dev wan nodad",
                    f"addr add 2001:db8:{home}::1/64 dev lan nodad",
                    *[f"route add 2001:db8:{other}::/64 via 2001:db8::{other}" for other in others],
                ],
            )
            address = f"addr add 2001:db8:{home}::5/64 dev eth0 nodad"
            ip(self.name(f"home{home}"), [address, f"route add default via 2001:db8:{home}::1"])

    def change_address(self, home: int, address: str) -> None:
        """Give the router of a home another public address. Its connections end."""
        ip(self.name(f"router{home}"), ["addr flush dev wan", f"addr add {address}/24 dev wan"])

    def _plug(self, machine: str, number: int, address: str) -> None:
        name, internet = self.name(machine), self.name("internet")
        ip(
            internet,
            [f"link add port{number} type veth peer name wan netns {name}", f"link set port{number} master br0"],
        )
        ip(internet, [f"link set port{number} up"])
        ip(name, [f"addr add {address}/24 dev wan", "link set wan up"])

    def _in(self, machine: str, *command: str, text: str = "") -> str:
        return call((*self.prefix(machine), *command), text)

    def remove(self) -> None:
        for name in self._names:
            with suppress(EmulationError):
                call(("ip", "netns", "del", name))


@contextmanager
def internet(*kinds: str) -> Iterator[Internet]:
    """Context manager: builds it with one home per kind of router, and removes it at the end."""
    built = Internet(kinds)
    try:
        built.build()
        yield built
    finally:
        built.remove()
