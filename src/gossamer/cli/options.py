"""Options that several commands share, and their checks.

Modules that import torch are imported when an option is checked, so that a command's help is fast."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from inspect import signature
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gossamer.base.host_port import Address, read_host_port
from gossamer.base.spans import active
from gossamer.base.spans.step_range import StepRange, read_steps
from gossamer.base.units import MOST_QUANTITY, parse_quantity
from gossamer.comm.bandwidth.limits import MachineLimits
from gossamer.comm.network import Network, read_network
from gossamer.errors import ConnectError, GossamerError
from gossamer.launcher.job import MOST_WORKERS, InvitationOptions, WorkerRange, interfaces, read_worker_range
from gossamer.observe.exporters.destination import FORMS, read_destination

Command = Callable[..., Any]
PrivateNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
PrivateAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
PICTURES = (".png", ".pdf", ".svg", ".eps", ".jpg", ".jpeg", ".webp", ".tif", ".tiff")  # formats of matplotlib
LONGEST_NAME = 255 - len(".0123456789.draft")  # bytes, of a file with a temporary name first
CERTIFICATES = ("cert.pem", "key.pem", "ca.pem")


class FiniteRange(click.FloatRange):
    """A number within limits. It refuses nan and infinity, which click's ranges accept, and numbers whose products
    with others would be infinite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{number} is not a finite number", param, ctx)
        if number > MOST_QUANTITY:
            self.fail(f"{number} is out of range: write a number up to {MOST_QUANTITY:g}", param, ctx)
        return number


def check_collective(context: click.Context, option: click.Parameter, requested: str | None) -> str | None:
    if requested is None:
        return None
    from gossamer.comm.mesh.collective_selector import check_requested

    try:
        check_requested(requested)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return requested


def check_congestion(context: click.Context, option: click.Parameter, name: str | None) -> str | None:
    from gossamer.comm.mesh.long_links import check_congestion

    try:
        if name is not None:
            check_congestion(name)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return name


def check_destinations(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> str | None:
    """Value of GOSSAMER_LOG_TO for the workers. An invalid destination is refused once here."""
    try:
        return ",".join(str(read_destination(text).at(Path.cwd())) for text in texts) or None
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def check_interface(context: click.Context, option: click.Parameter, name: str | None) -> str | None:
    if name is not None and name not in interfaces():
        raise click.BadParameter(f"this machine has no interface {name!r}; it has: {', '.join(interfaces())}")
    return name


def check_parent(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before the run."""
    if path is not None and not path.name:
        raise click.BadParameter(f"the name of the file is empty. Write {option.opts[0]} FILE")
    if path is not None and len(os.fsencode(path.name)) > LONGEST_NAME:
        raise click.BadParameter(f"the name of the file has more than {LONGEST_NAME} bytes: write a shorter one")
    if path is not None and not os.path.isdir(path.parent):
        raise click.BadParameter(f"there is no directory {path.parent} to write {path.name} into")
    if path is not None and not os.access(path.parent, os.W_OK):
        raise click.BadParameter(
            f"{path.parent} is not writable, so {path.name} cannot be written: name another folder"
        )
    return path


def check_picture(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a picture that cannot be written, before the run."""
    path = check_parent(context, option, path)
    if path is not None and path.suffix.lower() not in PICTURES:
        raise click.BadParameter(
            f"{path.name} must end in one of {', '.join(PICTURES)}. Write: {option.opts[0]} {path.with_suffix('.png')}"
        )
    return path


def check_token(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Refuse an invalid token file before anything starts."""
    if path is not None:
        from gossamer.comm.environment.run_token import check_token_file

        try:
            return check_token_file(path)
        except ConnectError as error:
            raise click.BadParameter(str(error)) from None
    return path


def check_certificates(context: click.Context, option: click.Parameter, folder: Path | None) -> Path | None:
    """Refuse a folder without certificates before anything starts."""
    if folder is not None and (missing := [name for name in CERTIFICATES if not os.path.isfile(folder / name)]):
        raise click.BadParameter(
            f"{', '.join(missing)} missing in {folder}. It needs this machine's certificate and key, and its "
            "authority's certificate: cert.pem, key.pem, ca.pem."
        )
    return folder if folder is None else folder.resolve()


def check_watch(context: click.Context, option: click.Parameter, wanted: bool) -> bool:
    """Refuse before the run if the page cannot be served."""
    if wanted:
        from gossamer.observe.watch.server import check_installed as check_page

        try:
            check_page()
        except GossamerError as error:
            raise click.UsageError(str(error)) from None
    return wanted


def check_installed(*packages: str) -> None:
    """Raise if packages are missing, before workers start and each fails with its own traceback."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise click.ClickException(
            f"{' and '.join(missing)} cannot be found by {sys.executable}, and the workers need them. "
            f"Write: {sys.executable} -m pip install {' '.join(missing)}"
        )


def output_option(name: str, help_text: str) -> Callable[[Command], Command]:
    """An option --NAME for an output file, passed to the command as `NAME_file`."""
    file = click.Path(dir_okay=False, writable=True, path_type=Path)
    check = check_picture if name in ("plot", "picture") else check_parent
    return click.option(f"--{name}", f"{name}_file", type=file, callback=check, help=help_text)


def option_group(
    name: str, make: Callable[..., Any], *options: Callable[[Command], Command]
) -> Callable[[Command], Command]:
    """A decorator that adds `options` to a command, which receives one value for all of them.

    Args:
        name: the argument of the command.
        make: makes the value; its parameters are named as those of the options.
        options: in the order of the help.
    """
    parameters = tuple(signature(make).parameters)

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_group(**given: Any) -> Any:
            value = make(**{each: given.pop(each) for each in parameters})
            return command(**{name: value}, **given)

        decorated: Command = with_group
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


emulation_option = click.option(
    "--network", "network_text", metavar="SPEC", help="Emulate a network: RATE[,ROUND_TRIP][,loss=P] per host, or TOML."
)


speeds_option = click.option(
    "--speeds",
    "speeds_text",
    metavar="SPEEDS",
    help="Speed of each worker, such as 1,1,1,0.2 or 1x3,0.2; a worker of speed 1 has the measured or given compute "
    "time. Or the folder of a run that measured them.",
)


log_to_option = click.option(
    "--log-to",
    multiple=True,
    metavar="KIND:TARGET",
    callback=check_destinations,
    help=f"Export metrics during the run; may be repeated: {FORMS}.",
)


@dataclass(frozen=True)
class Machines:
    """The machines of a run, named as Job's fields. Raises click.UsageError for contradicting options."""

    interface: str | None
    nodes: int
    node_rank: int
    rendezvous: str | None

    def __post_init__(self) -> None:
        if self.nodes > 1 and self.rendezvous is None:
            raise click.UsageError("Several machines need a rendezvous: add --rendezvous HOST:PORT, the same on all.")
        if self.node_rank >= self.nodes:
            raise click.UsageError(
                f"--node-rank must be in 0..{self.nodes - 1} for --nnodes {self.nodes}, got {self.node_rank}."
            )
        self.hosts()

    def hosts(self) -> list[str]:
        """Addresses at which other machines reach this run or this machine, as far as they were named.

        Raises ConnectError for an invalid rendezvous.
        """
        if self.rendezvous is None:
            return []
        from gossamer.comm.environment import interfaces
        from gossamer.launcher.rendezvous import split_endpoint

        named = interfaces().get(self.interface) if self.interface else None
        return [split_endpoint(self.rendezvous)[0], *([named] if named else [])]

    def emulated(self, network_text: str | None, hosts: int) -> Network | None:
        """The network to emulate between `hosts` hosts on this machine; None for no emulation."""
        network = read_network(network_text, hosts) if network_text is not None else None
        if network is not None and (self.nodes > 1 or self.interface is not None):
            raise click.UsageError("--network emulates all machines on this one: leave out --nnodes and --interface.")
        return network


machine_options = option_group(
    "machines",
    Machines,
    click.option("--interface", callback=check_interface, help="The network interface to use, such as eth0."),
    click.option("--nnodes", "nodes", type=click.IntRange(1), default=1, show_default=True, help="Number of machines."),
    click.option("--node-rank", type=click.IntRange(0), default=0, show_default=True, help="Number of this machine."),
    click.option("--rendezvous", metavar="HOST:PORT", help="Address of machine 0, the same on all machines."),
)


HOST_PORT = "{text!r} is not an address of a coordinator. Write HOST:PORT, such as 10.0.0.1:29600"
EVERYWHERE = ("0.0.0.0", "::", "*")


if TYPE_CHECKING:
    WorkerParam = click.ParamType[int | WorkerRange]
else:
    WorkerParam = click.ParamType  # older versions of click have no type parameter


class WorkerCount(WorkerParam):
    """A whole number, or MIN:MAX or MIN:MAX:FIRST of an elastic run as a WorkerRange."""

    name = "N or MIN:MAX"
    fixed = click.IntRange(1, MOST_WORKERS)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | WorkerRange:
        if isinstance(value, str) and ":" in value:
            try:
                return read_worker_range(value)
            except ValueError as error:
                self.fail(str(error), param, ctx)
        return self.fixed.convert(value, param, ctx)


def read_address(text: str) -> Address:
    """Read HOST:PORT. Raises BadParameter."""
    try:
        return read_host_port(text, least=0)
    except ValueError:
        raise click.BadParameter(HOST_PORT.format(text=text)) from None


def check_address(context: click.Context, option: click.Parameter, text: str | None) -> tuple[str, int] | None:
    address = None if text is None else read_address(text)
    if address is not None and address[0] in EVERYWHERE:
        raise click.BadParameter(
            f"other machines cannot reach this one at {address[0]}. Write its own address, such as 10.0.0.1:29600"
        )
    return address


UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MOST_LIFETIME_SECONDS = 3650 * 86400.0


def check_lifetime(context: click.Context, option: click.Parameter, text: str) -> float | None:
    """Seconds of a text such as 24h; None for `run`."""
    if text == "run":
        return None
    try:
        seconds = parse_quantity(text, UNIT_SECONDS, "a lifetime", "24h, or `run` for the whole run")
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if not 0 < seconds <= MOST_LIFETIME_SECONDS:
        raise click.BadParameter(f"{text!r} is not above 0 and at most 3650d. Write a time such as 24h, or `run`")
    return seconds


def check_notices(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    """Refuse a text that names no source of preemption notices."""
    if text is not None:
        from gossamer.launcher.preemption_notice import notices_of

        try:
            notices_of(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
    return text


def check_addresses(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(check_address(context, option, text) for text in texts)


lifetime_option = click.option(
    "--lifetime",
    default="24h",
    show_default=True,
    callback=check_lifetime,
    help="How long the link is valid: 30m, 24h, 7d, or `run` for the whole run.",
)
uses_option = click.option("--uses", type=click.IntRange(1), help="How many machines may use the link.  [default: all]")


def check_networks(
    context: click.Context, option: click.Parameter, texts: tuple[str, ...]
) -> tuple[PrivateNetwork, ...]:
    try:
        return tuple(ipaddress.ip_network(text) for text in texts)
    except ValueError as error:
        raise click.BadParameter(f"{error}. Write an address and a prefix length, such as 10.0.0.0/8") from None


@dataclass(frozen=True)
class Encryption:
    """Whether workers seal their connections.

    They do if other machines reach the run by an address outside of `private` networks, unless `plaintext`.
    """

    plaintext: bool = False
    private: tuple[PrivateNetwork, ...] = ()

    @property
    def option(self) -> str:
        """The option that was given; "" for none."""
        return "--plaintext" if self.plaintext else "--private-network" if self.private else ""

    def is_needed(self, hosts: Iterable[str]) -> bool:
        """Whether a run with these addresses is encrypted. A name counts as the addresses that it resolves to."""
        return not self.plaintext and any(not self._is_private(each) for host in hosts for each in _resolved(host))

    def _is_private(self, address: PrivateAddress | None) -> bool:
        if address is None:
            return False
        return address.is_loopback or any(address in network for network in self.private)


def _resolved(host: str) -> list[PrivateAddress | None]:
    """The addresses of a host; None for an unknown name."""
    try:
        found = {str(each[4][0]).partition("%")[0] for each in socket.getaddrinfo(host, None)}
    except OSError:
        return [None]
    return [ipaddress.ip_address(each) for each in found]


@dataclass(frozen=True)
class ElasticOptions:
    """Options of elastic runs as they were given; `read_elasticity` checks them together."""

    join: tuple[str, int] | None = None
    listen: tuple[str, int] | None = None
    invitation: InvitationOptions = InvitationOptions()
    relay: bool = False
    encryption: Encryption = Encryption()


def _elastic(
    join: tuple[str, int] | None,
    listen: tuple[str, int] | None,
    invite: Path | None,
    invite_lifetime: float | None,
    invite_uses: int | None,
    public_address: tuple[tuple[str, int], ...],
    relay: bool,
    private_network: tuple[PrivateNetwork, ...],
    plaintext: bool,
) -> ElasticOptions:
    invitation = InvitationOptions(
        file=invite, lifetime_seconds=invite_lifetime, uses=invite_uses, addresses=public_address
    )
    return ElasticOptions(join, listen, invitation, relay, Encryption(plaintext, private_network))


elastic_options = option_group(
    "elastic",
    _elastic,
    click.option(
        "--join", metavar="HOST:PORT", callback=check_address, help="Add workers to an elastic run; needs --token-file."
    ),
    click.option(
        "--listen",
        metavar="HOST:PORT",
        callback=check_address,
        help="Address at which other machines join an elastic run.  [default: the interface's address, or loopback]",
    ),
    click.option(
        "--invite",
        type=click.Path(dir_okay=False, writable=True, path_type=Path),
        callback=check_parent,
        help="File for the link with which other machines join an elastic run.  [default: in the folder of logs]",
    ),
    click.option(
        "--invite-lifetime", default="24h", show_default=True, callback=check_lifetime, help="30m, 7d, `run`."
    ),
    click.option("--invite-uses", type=click.IntRange(1), help="How many machines may use the link.  [default: all]"),
    click.option(
        "--public-address",
        metavar="HOST:PORT",
        multiple=True,
        callback=check_addresses,
        help="Another address at which machines reach --listen, such as a forwarded port of the router.",
    ),
    click.option(
        "--relay",
        is_flag=True,
        help="Elastic runs: forward the traffic of workers that cannot connect to each other, and seal all "
        "connections.",
    ),
    click.option(
        "--private-network",
        metavar="CIDR",
        multiple=True,
        callback=check_networks,
        help="A network of your own, such as 10.0.0.0/8, on which workers of several machines do not encrypt; may be "
        "repeated.",
    ),
    click.option(
        "--plaintext",
        is_flag=True,
        help="Do not encrypt between workers. By default, they do if other machines reach this run by an address "
        "outside of each --private-network.",
    ),
)


def _limits(upload_limit: str | None, download_limit: str | None, daily_cap: str | None) -> MachineLimits | None:
    """None without one."""
    texts = {"upload": upload_limit, "download": download_limit, "daily_cap": daily_cap}
    try:
        return MachineLimits().changed(texts) if any(text is not None for text in texts.values()) else None
    except GossamerError as error:
        raise click.BadParameter(str(error)) from None


limit_options = option_group(
    "limits",
    _limits,
    click.option(
        "--upload-limit",
        metavar="LIMIT",
        help="Limit of this machine's uploads: RATE[; RATE at HH:MM-HH:MM]..., such as '5mbit; none at 22:00-06:00'; "
        "`none` to set one later with `gossamer limit`.",
    ),
    click.option("--download-limit", metavar="LIMIT", help="Limit of this machine's downloads."),
    click.option(
        "--daily-cap", metavar="BYTES", help="Stop this machine's workers after so many bytes in a day, such as 10GB."
    ),
)


def first_workers(workers: int | WorkerRange) -> int:
    return workers if isinstance(workers, int) else workers.initial


def most_workers(workers: int | WorkerRange) -> int:
    return workers if isinstance(workers, int) else workers.most


def check_steps(context: click.Context, option: click.Parameter, text: str | None) -> StepRange | None:
    try:
        return None if text is None else read_steps(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def check_ranks(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    from gossamer.train.session.step_spans import read_ranks  # imported late: it imports torch

    try:
        if text is not None:
            read_ranks(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return text


@dataclass(frozen=True)
class Tracing:
    """The steps whose operations are recorded, and the ranks whose operators are profiled; None for none.

    Raises click.UsageError for ranks without steps.
    """

    trace: StepRange | None = None
    torch_profiler: str | None = None

    def __post_init__(self) -> None:
        if self.torch_profiler is not None and self.trace is None:
            raise click.UsageError(
                "--torch-profiler profiles the steps of --trace, which is missing: add --trace 100:102"
            )

    def check_ranks(self, world: int) -> None:
        """Raise click.UsageError if a profiled rank is not in a run of `world` ranks."""
        if self.torch_profiler is None:
            return
        from gossamer.train.session.step_spans import read_ranks

        ranks = read_ranks(self.torch_profiler) or frozenset()
        if beyond := sorted(rank for rank in ranks if rank >= world):
            there = ",".join(map(str, sorted(ranks.difference(beyond)) or range(min(world, 2))))
            raise click.UsageError(
                f"--torch-profiler {self.torch_profiler} has ranks that this run does not have "
                f"({', '.join(map(str, beyond))}): ranks are 0 to {world - 1}. Write --torch-profiler {there}, or all"
            )

    def settings(self, logs: Path) -> dict[str, str]:
        """Environment variables of the workers."""
        if self.trace is None:
            return {}
        from gossamer.train.session.step_spans import PROFILED

        variables = {active.TRACE: str(logs.resolve()), active.STEPS: str(self.trace)}
        return variables if self.torch_profiler is None else variables | {PROFILED: self.torch_profiler}


trace_options = option_group(
    "tracing",
    Tracing,
    click.option(
        "--trace",
        metavar="STEPS",
        callback=check_steps,
        help='Record the operations of every rank in these steps, such as 100:110, or "all", for `gossamer trace`.',
    ),
    click.option(
        "--torch-profiler",
        metavar="RANKS",
        callback=check_ranks,
        help='With --trace: also profile the operators of these ranks with torch.profiler, such as 0,2, or "all".',
    ),
)
