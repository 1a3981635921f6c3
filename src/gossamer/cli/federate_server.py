"""`gossamer federate serve` and `join`: a federation's server, and its devices, as processes on any machines."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from gossamer.cli.console import say
from gossamer.cli.options import check_recipe, output_option
from gossamer.cli.servers import check_certificates, check_token
from gossamer.environment.run_token import check_token_file, make_token, read_token
from gossamer.errors import ConnectError

if TYPE_CHECKING:
    from gossamer.federated.secure.roster import IdentityRoster
    from gossamer.transports.rpc.sockets import Address, Tls

PORT = 29600
LEAVE_SECONDS = 1.8  # after a signal, whatever the user's code does
INTERRUPTED = 130

Command = Callable[..., Any]


def _address(text: str, port: int | None) -> Address:
    """Read ADDRESS:PORT, [ADDRESS]:PORT or, with a port to fall back on, ADDRESS."""
    host, colon, number = text.rpartition(":")
    if text.startswith("[") and text.endswith("]"):
        host, colon, number = text, "", ""
    if not colon or (":" in host and not host.startswith("[")):  # no port, and perhaps a bare IPv6 address
        host, number = text, "" if port is None else str(port)
    if not host or not number.isdecimal() or int(number) > 65535:
        raise click.BadParameter(f"{text} is no address with a port. Write ADDRESS:PORT, such as 192.0.2.1:{PORT}")
    return host.strip("[]"), int(number)


def read_bind(context: click.Context, option: click.Parameter, text: str) -> Address:
    return _address(text, PORT)


def read_server(context: click.Context, option: click.Parameter, text: str) -> Address:
    return _address(text, None)


def make_missing_token(context: click.Context, option: click.Parameter, path: Path) -> Path:
    """The token file, which is made where there is none."""
    try:
        if not path.exists():
            make_token(path)
            say(f"Made {path}, by which devices prove that they belong to this federation: copy it to each.")
        return check_token_file(path)
    except OSError as problem:
        raise click.BadParameter(f"{path} cannot be made ({problem.strerror}). Name a file in a folder.") from None
    except ConnectError as error:
        raise click.BadParameter(str(error)) from None


def _script_with_arguments(command: Command) -> Command:
    command = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]...")(command)
    return click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))(command)


tls_option = click.option(
    "--tls",
    type=click.Path(file_okay=False, path_type=Path),
    callback=check_certificates,
    metavar="DIRECTORY",
    help="Encrypt by cert.pem, key.pem and ca.pem in it; servers and devices show certificates of one authority.",
)


roster_option = click.option(
    "--roster",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Public keys of all devices, the same file everywhere; for recipes with secure=SecureAggregation().",
)


@click.command("serve")
@_script_with_arguments
@click.option("--recipe", required=True, callback=check_recipe, help="How devices train and talk; they learn it here.")
@click.option("--clients", type=click.IntRange(1), required=True, help="Devices of the whole federation.")
@click.option("--rounds", type=click.IntRange(1), required=True, help="Versions to make.")
@click.option(
    "--bind",
    default="127.0.0.1",
    show_default=True,
    callback=read_bind,
    metavar="ADDRESS[:PORT]",
    help=f"Where to listen; other machines are served only where this says so. Port: {PORT}.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    required=True,
    callback=make_missing_token,
    help="The secret of server and devices, mode 0600; made where there is none.",
)
@tls_option
@click.option(
    "--journal",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder from which a server that was killed goes on.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of selection and rounding.")
@click.option(
    "--round-seconds",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="A round goes on then without those who have not reported.",
)
@click.option(
    "--over-selection",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Share of devices chosen beyond the cohort, of whom the slowest are not waited for.",
)
@click.option(
    "--absent-seconds",
    type=click.FloatRange(0, min_open=True),
    default=300.0,
    show_default=True,
    help="A device that sleeps or is disconnected keeps its task for so long.",
)
@roster_option
@output_option("json", "Write the federation's record there.")
def serve_command(
    script: Path,
    arguments: tuple[str, ...],
    recipe: str,
    clients: int,
    rounds: int,
    bind: Address,
    token_file: Path,
    tls: Path | None,
    journal: Path | None,
    seed: int,
    round_seconds: float,
    over_selection: float,
    absent_seconds: float,
    roster: Path | None,
    json_file: Path | None,
) -> None:
    """Serve a federation to devices that join.

    SCRIPT marks a model, a client function and perhaps an evaluation; see `gossamer federate`. Devices connect to this
    process, and it never connects to them. Ctrl-C and SIGTERM end it between two messages; with --journal the same
    command goes on from there, also after kill -9.
    """
    from gossamer.federated.deployment.reception import Patience
    from gossamer.federated.deployment.server import FederationServer, FederationSettings
    from gossamer.federated.script_file import load_script

    settings = FederationSettings(
        recipe=recipe,
        clients=clients,
        rounds=rounds,
        seed=seed,
        round_seconds=round_seconds,
        over_selection=over_selection,
        silent_seconds=absent_seconds,
        patience=Patience(absent_seconds=absent_seconds),
    )
    server = FederationServer(
        load_script(script, arguments),
        settings,
        token=read_token(token_file),
        address=bind,
        tls=_tls(tls),
        journal=journal,
        identities=_identities(roster),
        say=click.echo,
    )
    host, port = server.address
    if server.resumed:
        click.echo(f"going on from version {server.rounds.model.version} of {rounds}, as {journal} says")
    click.echo(f"serving {clients} clients at {host}:{port}; devices join by:")
    click.echo(
        f"  gossamer federate join {script} --server {'ADDRESS' if host in ('0.0.0.0', '::') else host}:{port} "
        f"--token-file {token_file.name}{'' if tls is None else ' --tls DIRECTORY'}"
    )
    with _stopping(server.stop):
        ended = server.run()
    if json_file is not None:
        server.report.record(json_file, ended)
    version = server.rounds.model.version
    if ended == "finished":
        click.echo(f"all {rounds} rounds are made")
        return
    how = (
        f"start the same command again: it goes on from {journal}"
        if journal is not None
        else "nothing was kept, since there was no --journal; what devices learned in these rounds is lost"
    )
    click.echo(f"stopped at version {version} of {rounds}; {how}")
    sys.exit(INTERRUPTED)


@click.command("join")
@_script_with_arguments
@click.option("--server", required=True, callback=read_server, metavar="ADDRESS:PORT", help="Where to connect to.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    required=True,
    callback=check_token,
    help="The federation's secret, copied from the server, mode 0600.",
)
@tls_option
@click.option("--number", type=click.IntRange(0), help="The client that this device is.  [default: any that is free]")
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder that makes a restarted process the same device, which goes on with what it was sending.",
)
@roster_option
@click.option(
    "--identity",
    type=click.Path(dir_okay=False, path_type=Path),
    help="This device's private key, made where there is none; needed with --roster.",
)
@click.option(
    "--give-up-seconds",
    type=click.FloatRange(0, min_open=True),
    default=3600.0,
    show_default=True,
    help="Leave where the server does not answer for so long.",
)
def join_command(
    script: Path,
    arguments: tuple[str, ...],
    server: Address,
    token_file: Path,
    tls: Path | None,
    number: int | None,
    state: Path | None,
    roster: Path | None,
    identity: Path | None,
    give_up_seconds: float,
) -> None:
    """Take part in a federation as one device.

    SCRIPT is the server's, with this device's data. The recipe comes from the server. Connections are made from here
    only, and again wherever they break. Ctrl-C and SIGTERM leave within 2 s; with --state the same command goes on.
    """
    from gossamer.federated.deployment.device import DeviceOptions, FederationDevice
    from gossamer.federated.script_file import load_script
    from gossamer.federated.secure.roster import Identity

    if (roster is None) != (identity is None):
        raise click.UsageError("--roster and --identity go together: all devices' public keys, and this one's own")
    device = FederationDevice(
        load_script(script, arguments),
        server,
        token=read_token(token_file),
        tls=_tls(tls),
        number=number,
        directory=state,
        identities=_identities(roster),
        identity=None if identity is None else Identity.kept_at(identity),
        options=DeviceOptions(give_up_seconds=give_up_seconds),
        say=click.echo,
    )
    try:
        with _interrupting():
            counted = device.run()
    except KeyboardInterrupt:
        device.leave()
        click.echo("left" + ("; start the same command again to go on" if state is not None else ""))
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # whatever threads the user's code has
    finally:
        device.close()
    click.echo(f"the federation has ended; {counted} contributions of this start were counted")


def _identities(path: Path | None) -> IdentityRoster | None:
    from gossamer.federated.secure.roster import IdentityRoster

    return None if path is None else IdentityRoster.read(path)


def _tls(folder: Path | None) -> Tls | None:
    from gossamer.environment.run_settings import tls_contexts
    from gossamer.transports.rpc.sockets import Tls

    return None if folder is None else Tls(*tls_contexts(str(folder)))


@contextmanager
def _stopping(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM calls `stop`, the second ends this process at once."""

    def told(number: int, frame: FrameType | None) -> None:
        stop()
        signal.signal(number, signal.SIG_DFL)

    with _handling(told):
        yield


@contextmanager
def _interrupting() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt here; a process that is still there soon after is ended.

    A signal is heard by a thread, too, as the user's code may be in a long call, or keep the exception to itself.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def end_soon() -> None:
        if os.read(reading, 1):
            threading.Event().wait(LEAVE_SECONDS)
            os._exit(INTERRUPTED)

    def told(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.set_wakeup_fd(writing)
    threading.Thread(target=end_soon, name="gossamer leaving", daemon=True).start()
    try:
        with _handling(told):
            yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
