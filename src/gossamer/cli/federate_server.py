"""`gossamer federate serve`, `join` and `enroll`: a federation's server and its devices, as processes anywhere."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from gossamer.cli.console import echo, say
from gossamer.cli.federate_options import FederationPlan, plan_options, save_option, saved, script_with_arguments
from gossamer.cli.options import check_certificates, check_parent, check_recipe, check_token, output_option
from gossamer.comm.environment.run_token import check_token_file, make_token, read_token
from gossamer.comm.runtime.signal_handlers import STOP_SIGNALS, handling
from gossamer.errors import ConnectError

if TYPE_CHECKING:
    from gossamer.comm.rpc.sockets import Address, Tls
    from gossamer.federated.secure_aggregation.identities import IdentityRoster

PORT = 29600
LEAVE_SECONDS = 1.8  # after a signal, whatever the user's code does
INTERRUPTED = 130


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
    help="Numbers and public keys of all devices, lines of `enroll`, the same file everywhere; for recipes with "
    "secure=SecureAggregation().",
)


@click.command("serve")
@script_with_arguments
@plan_options
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
@click.option(
    "--absent-seconds",
    type=click.FloatRange(0, min_open=True),
    default=300.0,
    show_default=True,
    help="A device that sleeps or is disconnected keeps its task for so long.",
)
@roster_option
@save_option
@output_option("json", "Write the federation's record there.")
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

    SCRIPT marks a model, a client function and perhaps an evaluation; see `gossamer federate`. Devices connect to this
    process, and it never connects to them. Ctrl-C and SIGTERM end it between two messages; with --journal the same
    command goes on from there, also after kill -9.
    """
    from gossamer.federated.client.functions import load_script
    from gossamer.federated.deployment.reception import Patience
    from gossamer.federated.deployment.server import FederationServer, FederationSettings

    loaded = load_script(script, arguments)
    try:
        settings = FederationSettings(
            **plan.given,
            silent_seconds=absent_seconds,
            patience=Patience(absent_seconds=absent_seconds),
        )
        server = FederationServer(
            loaded,
            settings,
            token=read_token(token_file),
            address=bind,
            tls=_tls(tls),
            journal=journal,
            identities=_identities(roster),
            say=echo,
        )
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    host, port = server.address
    if server.resumed:
        echo(f"going on from version {server.rounds.model.version} of {plan.rounds}, as {journal} says")
    echo(f"serving {plan.clients} clients at {host}:{port}; devices join by:")
    also = {"--tls DIRECTORY": tls, "--roster FILE --identity FILE": roster, shlex.join(("--", *arguments)): arguments}
    words = [f"--server {'ADDRESS' if host in ('0.0.0.0', '::') else host}:{port}", f"--token-file {token_file.name}"]
    words += ["--state DIRECTORY", *(word for word, given in also.items() if given)]
    echo(f"  gossamer federate join {script} {' '.join(words)}")
    try:
        with _stopping(server.stop):
            ended = server.run()
    finally:  # also of a federation that failed
        version = server.rounds.model.version
        if save_file is not None and version:
            echo(saved(server.model(), save_file))
        if json_file is not None:
            server.record(json_file)
    if ended == "finished":
        echo(f"all {plan.rounds} rounds are made")
        return
    if ended != "stopped":
        echo(f"ended at version {version} of {plan.rounds}: {server.why}")
        return
    echo(f"stopped at version {version} of {plan.rounds}; {_how_to_go_on(journal, save_file)}")
    sys.exit(INTERRUPTED)


def _how_to_go_on(journal: Path | None, save_file: Path | None) -> str:
    if journal is not None:
        return f"start the same command again: it goes on from {journal}"
    if save_file is not None:
        return "the same command would begin anew, since there was no --journal"
    return "nothing was kept, since there was no --journal; what devices learned in these rounds is lost"


@click.command("join")
@script_with_arguments
@click.option("--server", required=True, callback=read_server, metavar="ADDRESS:PORT", help="Where to connect to.")
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
    help="Take part by this recipe only, whatever the server says.  [default: by the server's]",
)
@click.option(
    "--number",
    type=click.IntRange(0),
    help="The client that this device is.  [default: the one of its identity in --roster, else any that is free]",
)
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder that makes a restarted process the same device, which goes on with what it was sending.",
)
@roster_option
@click.option(
    "--identity",
    type=click.Path(dir_okay=False, path_type=Path),
    help="This device's private key, as `enroll` wrote it; needed with --roster.",
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
    recipe: str | None,
    number: int | None,
    state: Path | None,
    roster: Path | None,
    identity: Path | None,
    give_up_seconds: float,
) -> None:
    """Take part in a federation as one device.

    SCRIPT is the server's, with this device's data. The recipe comes from the server, and --recipe says which one this
    device agrees to, so that no server can leave privacy or masks out. Connections are made from here
    only, and again wherever they break. Ctrl-C and SIGTERM leave within 2 s; with --state the same command goes on.
    """
    from gossamer.federated.client.functions import load_script
    from gossamer.federated.deployment.device import DeviceOptions, FederationDevice
    from gossamer.federated.secure_aggregation.identities import Identity

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
        recipe=recipe,
        options=DeviceOptions(give_up_seconds=give_up_seconds),
        say=echo,
    )
    try:
        with _interrupting():
            counted = device.run()
    except KeyboardInterrupt:
        device.leave()
        echo("left" + ("; start the same command again to go on" if state is not None else ""))
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # whatever threads the user's code has
    finally:
        device.close()
    echo(f"the federation has ended; {counted} contributions of this start were counted")


@click.command("enroll")
@click.option("--number", type=click.IntRange(0), required=True, help="The client that this device is to be.")
@click.option(
    "--identity",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    callback=check_parent,
    help="Its private key, which never leaves it; made where there is none.",
)
def enroll_command(number: int, identity: Path) -> None:
    """Print this device's line of the roster, its number and its public key.

    The lines of all devices make one file, which is copied to the server and to every device: --roster FILE.
    """
    from gossamer.federated.secure_aggregation.identities import Identity, IdentityRoster

    click.echo(IdentityRoster.line(number, Identity.kept_at(identity).public), nl=False)


def _identities(path: Path | None) -> IdentityRoster | None:
    from gossamer.federated.secure_aggregation.identities import IdentityRoster

    return None if path is None else IdentityRoster.read(path)


def _tls(folder: Path | None) -> Tls | None:
    from gossamer.comm.environment.run_settings import tls_contexts
    from gossamer.comm.rpc.sockets import Tls

    return None if folder is None else Tls(*tls_contexts(str(folder)))


@contextmanager
def _stopping(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM calls `stop`, the second ends this process at once."""

    def told(number: int, frame: FrameType | None) -> None:
        stop()
        signal.signal(number, signal.SIG_DFL)

    with handling(told, *STOP_SIGNALS):
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
        with handling(told, *STOP_SIGNALS):
            yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)
