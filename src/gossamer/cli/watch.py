"""`gossamer watch`: a page, or a terminal view, of runs during and after training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from gossamer.cli.console import echo, print_text
from gossamer.observe.control_sequences import SafeConsole
from gossamer.observe.watch.ingestion import ingesting, writable
from gossamer.observe.watch.runs import WatchedRun, find_runs
from gossamer.observe.watch.server import PageServer
from gossamer.observe.watch.terminal_view import watch_in_terminal

OPENED = "watch this run at {link} (the link contains its token: share it with care)"


@click.command("watch")
@click.option("--terminal", is_flag=True, help="Show a summary in this terminal, without a page.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen at; other machines need one that is not loopback.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="[default: a free one]")
@click.option("--allow-host", "names", multiple=True, metavar="NAME", help="Another name of this machine in links.")
@click.option("--open", "opened", is_flag=True, help="Open the page in this machine's browser.")
@click.argument("folders", metavar="[RUN]...", nargs=-1, type=click.Path(exists=True, file_okay=False, path_type=Path))
def watch_command(
    terminal: bool, host: str, port: int, names: tuple[str, ...], opened: bool, folders: tuple[Path, ...]
) -> None:
    """Watch RUN, a run's folder, or several runs; by default the newest in runs/.

    Runs may be active, finished, or crashed. The page is read-only, listens on this machine only, and requires the
    token in its link. From another machine: ssh -L 8080:127.0.0.1:PORT, and port 8080 in the link.
    """

    def note(sentence: str) -> None:
        print_text(f"gossamer: {sentence}")

    with writable(find_runs(folders), note) as runs, ingesting(runs, note):
        try:
            if terminal:
                watch_in_terminal(runs, SafeConsole(highlight=False))
            else:
                _serve(PageServer(runs, host, port, names), runs, opened)
        except KeyboardInterrupt:  # also raised by uvicorn once the page has ended
            print_text("The runs continue.")


def _serve(server: PageServer, runs: Sequence[WatchedRun], opened: bool) -> None:
    echo(f"{', '.join(run.name for run in runs)}: {server.link}")
    print_text("Ctrl-C ends the page; the runs continue.")
    if opened:
        click.launch(server.link)
    server.serve()


@contextmanager
def served_page(logs: Path) -> Iterator[None]:
    """Serve the page of a run while the block runs, and print its link. logs: folder of the run."""
    with PageServer([WatchedRun("0", logs)]).in_thread() as link:
        print_text(OPENED.format(link=link))
        yield
    print_text(f"The page has ended with the run. To show it again: gossamer watch {logs}")
