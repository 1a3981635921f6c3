"""`gossamer join`: joins the run of a link, with the options of `gossamer run`."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

import click

from gossamer.base import bounded_file, system
from gossamer.cli.program import refuse_given
from gossamer.cli.run import run
from gossamer.comm.membership.invitations import PREFIX, JoinLink, read_invitation
from gossamer.errors import ConnectError, GossamerError
from gossamer.launcher.job import WorkerRange

LINK_FIRST = "the link comes first: gossamer join LINK [OPTIONS] SCRIPT"
NOT_ALONE = "{option} is for `gossamer run`; the link contains the address and the token of the run: leave it out."
NOT_IN_JOIN = (
    *("join", "token_file", "invite", "invite_lifetime", "invite_uses", "private_network", "plaintext"),
    *("network_text", "nodes", "node_rank", "rendezvous", "servers", "dry_run"),
)
MOST_FILE_BYTES = 2**16


@click.command(
    "join", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, no_args_is_help=True
)
@click.argument("link", metavar="LINK|@FILE|-")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS] SCRIPT [ARGUMENTS]...")
def join(link: str, words: tuple[str, ...]) -> None:
    """Add workers of this machine to the elastic run of LINK.

    The first launcher prints the link, and `gossamer invite` prints more. OPTIONS are those of `gossamer run`; the
    default is one worker. The recipe of the run's command is taken over. With --relay --listen HOST:PORT, this machine
    also relays traffic of workers that cannot connect to each other.

    A link is as secret as a password. @FILE reads it from a file with mode 0600, and - from standard input, so that
    other users of this machine and the history of the shell do not see it.
    """
    from gossamer.cli.launchers import JOINED_RANGE, RELAY_LISTENS
    from gossamer.comm.elastic.invited import redeem
    from gossamer.comm.environment.run_token import make_token
    from gossamer.comm.tls_contexts import tls_contexts

    invitation = read_link(link)
    context = run.make_context("join", ["--workers", "1", *words], parent=click.get_current_context().parent)
    options = context.params
    refuse_given(context, NOT_IN_JOIN, NOT_ALONE)
    if isinstance(options["workers"], WorkerRange):
        raise click.UsageError(JOINED_RANGE.format(initial=options["workers"].initial))
    if options["relay"] is not (options["listen"] is not None):
        raise click.UsageError(RELAY_LISTENS)
    tls = tls_contexts(options["tls"])
    address, welcome = redeem(invitation, tls)
    for name in ("recipe", "collective"):
        options[name] = options[name] or welcome.settings.get(name)
    launcher, folder = os.getpid(), Path(tempfile.mkdtemp(prefix="gossamer-join-"))  # mode 0700
    try:
        options |= {"join": address, "token_file": make_token(folder / "token", welcome.token)}
        run.invoke(context)
    finally:
        if os.getpid() == launcher:  # workers are forks of it, and read the token
            shutil.rmtree(folder, ignore_errors=True)


def read_link(text: str) -> JoinLink:
    """Read an invitation from a link, @FILE, or standard input (-). Raises click.BadParameter.

    A link is removed from this process's arguments, as far as the system allows it.
    """
    try:
        if text.startswith("@"):
            return read_invitation(_read_file(Path(text[1:])))
        if text == "-":
            return read_invitation(sys.stdin.readline())
        if text.startswith("-"):
            raise click.UsageError(LINK_FIRST)
        if text.startswith(PREFIX):
            hide_argument(text)
        return read_invitation(text)
    except GossamerError as error:
        raise click.BadParameter(str(error), param_hint="LINK") from None


def _read_file(path: Path) -> str:
    try:
        found = path.stat()
        is_file = stat.S_ISREG(found.st_mode)
        text = bounded_file.read_text(path, MOST_FILE_BYTES)  # of a pipe or a device, too
    except (OSError, ValueError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else problem
        raise ConnectError(f"the link cannot be read from {path}: {why}") from None
    if is_file and not system.is_private(found):
        raise ConnectError(
            f"{path} (mode {stat.S_IMODE(found.st_mode):04o}) can be read by other users, who could join the run. "
            f"Write: chmod 600 {path}"
        )
    return text


def hide_argument(text: str) -> None:
    """Remove an argument from the list of processes (Linux), and from sys.argv, which later messages print.

    Between the start of the process and this call it is visible: @FILE and - are the safe forms.
    """
    sys.argv = ["LINK" if each == text else each for each in sys.argv]
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, by proc(5)
        arguments = ctypes.string_at(begin, end - begin)
    except (OSError, ValueError, IndexError):
        return  # not Linux
    place = arguments.find(text.encode())
    while place >= 0:
        ctypes.memset(begin + place, ord("x"), len(text.encode()))
        place = arguments.find(text.encode(), place + 1)
