"""`gossamer federate serve`, `join` and `enroll`: server and devices of a federation as separate processes."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from gossamer.base.host_port import Address, read_host_port
from gossamer.cli.console import echo, print_text
from gossamer.cli.federate_options import FederationPlan, plan_options, save_option, saved, script_with_arguments
from gossamer.cli.options import FiniteRange, check_certificates, check_parent, check_token, output_option
from gossamer.cli.program import RunsScript
from gossamer.cli.recipe_options import check_recipe
from gossamer.comm.environment.run_token import check_token_file, make_token, read_token
from gossamer.comm.runtime.signal_handlers import STOP_SIGNALS, handling
from gossamer.errors import ConnectError

if TYPE_CHECKING:
    from gossamer.federated.secure_aggregation.identities import IdentityRoster

PORT = 29600
LEAVE_SECONDS = 1.8  # after a signal; then the process ends even if the user's code blocks
INTERRUPTED = 130


def _address(text: str, port: int | None) -> Address:
    """Read ADDRESS:PORT, [ADDRESS]:PORT or, with a default port, ADDRESS."""
    host, colon, number = text.rpartition(":")
    if text.startswith("[") and text.endswith("]"):
        host, colon, number = text, "", ""
    if not colon or (":" in host and not host.startswith("[")):  # no port; it may be a bare IPv6 address
        host, number = text, "" if port is None else str(port)
    try:
        return read_host_port(f"{host}:{number}", least=0)
    except ValueError:
        raise click.BadParameter(
            f"{text} is not an address with a port. Write ADDRESS:PORT, such as 192.0.2.1:{PORT}"
        ) from None


def read_bind(context: click.Context, option: click.Parameter, text: str) -> Address:
    return _address(text, PORT)


def read_server(context: click.Context, option: click.Parameter, text: str) -> Address:
    return _address(text, None)


def make_missing_token(context: click.Context, option: click.Parameter, path: Path) -> Path:
    """Path of the token file, which is created if it is missing."""
    try:
        if not path.exists():
            make_token(path)
            print_text(f"Created {path}, the secret by which devices authenticate: copy it to each device.")
        return check_token_file(path)
    except OSError as problem:
        raise click.BadParameter(f"{path} cannot be created ({problem.strerror}). Name another file.") from None
    except ConnectError as error:
        raise click.BadParameter(str(error)) from None


tls_option = click.option(
    "--tls",
    type=click.Path(file_okay=False, path_type=Path),
    callback=check_certificates,
    metavar="DIRECTORY",
    help="Encrypt with cert.pem, key.pem and ca.pem of this folder, all signed by one authority.",
)


roster_option = click.option(
    "--roster",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Numbers and public keys of all devices: the lines of `enroll`, the same file on server and devices; for "
    "recipes with secure=SecureAggregation().",
)


@click.command("serve", cls=RunsScript)
@script_with_arguments
@plan_options
@click.option(
    "--bind",
    default="127.0.0.1",
    show_default=True,
    callback=read_bind,
    metavar="ADDRESS[:PORT]",
    help=f"Address to listen at; for other machines, not loopback. Default port: {PORT}.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    required=True,
    callback=make_missing_token,
    help="The secret of server and devices, mode 0600; created if missing.",
)
@tls_option
@click.option(
    "--journal",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder from which a restarted server continues.",
)
@click.option(
    "--absent-seconds",
    type=FiniteRange(0, min_open=True),
    default=300.0,
    show_default=True,
    help="Time for which a sleeping or disconnected device keeps its task.",
)
@roster_option
@save_option
@output_option("json", "Write the federation's record as JSON.")
def serve_command(
    script: Path,
    arguments: tuple[str, ...],
    plan: FederationPlan,
    bind: Address,
    token_file: Path,
    tls: Path | None,
    journal: Path | None,
    absent_seconds: float,
    roster: Path | None,
    save_file: Path | None,
    json_file: Path | None,
) -> None:
    """Serve a federation to devices that join.

    SCRIPT defines a model, a client function and optionally an evaluation; see `gossamer federate`. Devices connect to
    this process; it opens no connections. Ctrl-C and SIGTERM end it between two messages. With --journal the same
    command continues from there, also after kill -9.
    """
    from gossamer.comm.tls_contexts import tls_contexts
    from gossamer.federated.client.functions import load_script
    from gossamer.federated.deployment.reception import Patience
    from gossamer.federated.deployment.server import FederationServer, FederationSettings

    loaded = load_script(script, arguments)
    try:
        settings = FederationSettings(
            recipe=plan.recipe,
            **plan.given,
            silent_seconds=absent_seconds,
            patience=Patience(absent_seconds=absent_seconds),
        )
        server = FederationServer(
            loaded,
            settings,
            token=read_token(token_file),
            address=bind,
            tls=tls_contexts(tls),
            journal=journal,
            identities=_identities(roster),
            print_text=echo,
        )
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    host, port = server.address
    if server.resumed:
        echo(f"continuing from version {server.rounds.model.version} of {plan.rounds}, from {journal}")
    echo(f"serving {plan.clients} clients at {host}:{port}; devices join by:")
    also = {"--tls DIRECTORY": tls, "--roster FILE --identity FILE": roster, shlex.join(("--", *arguments)): arguments}
    words = [f"--server {'ADDRESS' if host in ('0.0.0.0', '::') else host}:{port}", f"--token-file {token_file.name}"]
    words += ["--state DIRECTORY", *(word for word, given in also.items() if given)]
    echo(f"  gossamer federate join {script} {' '.join(words)}")
    try:
        with _stopping(server.stop):
            ended = server.run()
    finally:  # also after a failure
        version = server.rounds.model.version
        if save_file is not None and version:
            echo(saved(server.model(), save_file))
        if json_file is not None:
            server.record(json_file)
    if ended == "finished":
        echo(f"all {plan.rounds} rounds are complete")
        return
    if ended != "stopped":
        echo(f"ended at version {version} of {plan.rounds}: {server.why}")
        return
    echo(f"stopped at version {version} of {plan.rounds}; {_how_to_go_on(journal, save_file)}")
    sys.exit(INTERRUPTED)


def _how_to_go_on(journal: Path | None, save_file: Path | None) -> str:
    if journal is not None:
        return f"start the same command again: it continues from {journal}"
    if save_file is not None:
        return "without --journal, the same command begins again from the start"
    return "without --journal nothing was kept, and the training of these rounds is lost"


@click.command("join", cls=RunsScript)
@script_with_arguments
@click.option("--server", required=True, callback=read_server, metavar="ADDRESS:PORT", help="Address of the server.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    required=True,
    callback=check_token,
    help="The federation's secret, copied from the server, mode 0600.",
)
@tls_option
@click.option(
    "--recipe",
    callback=check_recipe,
    help="The only recipe that this device accepts.  [default: the server's]",
)
@click.option(
    "--number",
    type=click.IntRange(0),
    help="Client number of this device.  [default: that of its identity in --roster, else any free one]",
)
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder with the state of this device: a restarted process continues its unsent contribution.",
)
@roster_option
@click.option(
    "--identity",
    type=click.Path(dir_okay=False, path_type=Path),
    help="This device's private key, written by `enroll`; needed with --roster.",
)
@click.option(
    "--give-up-seconds",
    type=FiniteRange(0, min_open=True),
    default=3600.0,
    show_default=True,
    help="Leave if the server does not answer for this long.",
)
def join_command(
    script: Path,
    arguments: tuple[str, ...],
    server: Address,
    token_file: Path,
    tls: Path | None,
    recipe: str | None,
    number: int | None,
    state: Path | None,
    roster: Path | None,
    identity: Path | None,
    give_up_seconds: float,
) -> None:
    """Join a federation as one device.

    SCRIPT is the server's, with this device's data. The server sends the recipe; --recipe restricts this device to one
    recipe, so that a server cannot turn off privacy or masks. All connections are opened by this process, and reopened
    when they break. Ctrl-C and SIGTERM leave within 2 s; with --state the same command continues.
    """
    from gossamer.comm.tls_contexts import tls_contexts
    from gossamer.federated.client.functions import load_script
    from gossamer.federated.deployment.device import DeviceOptions, FederationDevice
    from gossamer.federated.secure_aggregation.identities import Identity

    if (roster is None) != (identity is None):
        raise click.UsageError("--roster (all public keys) and --identity (this device's key) are needed together")
    device = FederationDevice(
        load_script(script, arguments),
        server,
        token=read_token(token_file),
        tls=tls_contexts(tls),
        number=number,
        directory=state,
        identities=_identities(roster),
        identity=None if identity is None else Identity.kept_at(identity),
        recipe=recipe,
        options=DeviceOptions(give_up_seconds=give_up_seconds),
        print_text=echo,
    )
    try:
        with _interrupting():
            counted = device.run()
    except KeyboardInterrupt:
        device.leave()
        echo("left" + ("; start the same command again to continue" if state is not None else ""))
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # even if threads of the user's code are running
    finally:
        device.close()
    echo(f"the federation has ended; {counted} contributions of this process were counted")


@click.command("enroll")
@click.option("--number", type=click.IntRange(0), required=True, help="Client number of this device.")
@click.option(
    "--identity",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    callback=check_parent,
    help="File of its private key, which stays on this device; created if missing.",
)
def enroll_command(number: int, identity: Path) -> None:
    """Print this device's line of the roster: its number and its public key.

    The lines of all devices make one file; copy it to the server and to every device: --roster FILE.
    """
    from gossamer.federated.secure_aggregation.identities import Identity, IdentityRoster

    click.echo(IdentityRoster.line(number, Identity.kept_at(identity).public), nl=False)


def _identities(path: Path | None) -> IdentityRoster | None:
    from gossamer.federated.secure_aggregation.identities import IdentityRoster

    return None if path is None else IdentityRoster.read(path)


@contextmanager
def _stopping(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the first Ctrl-C or SIGTERM; the second one ends this process at once."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop()
        signal.signal(number, signal.SIG_DFL)

    with handling(on_signal, *STOP_SIGNALS):
        yield


@contextmanager
def _interrupting() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt in the block; if the process is still running soon after, it ends.

    A thread receives the signal, too: the user's code may be in a long call, or catch the exception.
    """
    reading, writing = socket.socketpair()  # Windows cannot make a pipe non-blocking
    writing.setblocking(False)

    def end_soon() -> None:
        if reading.recv(1):  # nothing once the block has ended
            threading.Event().wait(LEAVE_SECONDS)
            os._exit(INTERRUPTED)
        reading.close()

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.set_wakeup_fd(writing.fileno())
    threading.Thread(target=end_soon, name="gossamer leaving", daemon=True).start()
    try:
        with handling(on_signal, *STOP_SIGNALS):
            yield
    finally:
        signal.set_wakeup_fd(before)
        writing.close()
