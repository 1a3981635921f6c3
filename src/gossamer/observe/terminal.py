"""Terminal display of a run: the workers' lines, one line of progress below them, and a table at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from gossamer.base.units import bytes_text, count_text, ranks_text, seconds_text, share_text, short
from gossamer.observe.control_sequences import in_one_line, without_controls
from gossamer.observe.live import LiveView
from gossamer.observe.record import Record, network_text

RANK_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")
PLAIN_SECONDS, LONGEST_PLAIN_SECONDS = 5.0, 60.0  # between lines of progress without a terminal
AGREE = {True: "yes", False: "no", None: "unknown: only this machine's workers are in this record"}
TRUNCATED = "{ranks}: the disk was full, so their last steps and numbers are missing here"
UNRECORDED = "unknown: the disk was full, so the final parameters of {ranks} are not recorded"
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
LOCAL_STATISTICS = (
    ". BatchNorm's statistics are each rank's own where forward passes followed the last exchange, or with parameter "
    "servers. To average them, before session.close(): gossamer.average_([b for b in model.buffers() if "
    'b.is_floating_point()], "Dense()")'
)
CHANGED_FROZEN = (
    ". The script changes this parameter, which has requires_grad=False: EveryStep() sends gradients and buffers, not "
    "frozen parameters, so each rank keeps its own value. Register running statistics as buffers instead, "
    "module.register_buffer(name, tensor); or average it, before session.close(): gossamer.average_([p for p in "
    'model.parameters() if not p.requires_grad], "Dense()")'
)
SESSIONS = "{count} at the same time: a step is of any of them; parameters and the final model are of one"
APART = ", on the merged model; each holds its own (session.averaged_parameters)"


class Terminal:
    """Shows a run on a console; without a terminal, as plain lines.

    Worker lines go to `console`, standard output. Without a terminal, the launcher's progress and notes go to `aside`,
    standard error.

    status: shows the progress in place of such lines, as in a notebook cell.
    """

    def __init__(
        self,
        live: LiveView,
        console: Console,
        aside: Console,
        clock: Callable[[], float] = time.monotonic,
        status: Callable[[str], None] | None = None,
    ) -> None:
        self._live, self._status_line = live, status
        self._console = console
        self._aside = console if console.is_terminal else aside
        self._clock = clock
        self._began = clock()
        self._next_plain = self._began + PLAIN_SECONDS
        self._rewritten: dict[int, str] = {}  # unfinished, rewritten lines by rank
        self._spinner = Spinner("dots", style="cyan")

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Keep the progress line below all other lines in the block."""
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self._status, console=self._console, transient=True, refresh_per_second=8):
            yield

    def line(self, rank: int, text: str) -> None:
        """Show a line of a worker, with its colors. A line that ends in a carriage return will be replaced."""
        if text.endswith("\r"):
            self._rewritten[rank] = without_controls(text)
            return
        self._rewritten.pop(rank, None)
        self._console.print(_of_rank(rank, without_controls(text, colors=True)), soft_wrap=True)

    def note(self, sentence: str) -> None:
        text = Text.assemble(("gossamer: ", "bold yellow"), (without_controls(sentence), "yellow"))
        self._aside.print(text, soft_wrap=not self._aside.is_terminal)

    def show_secret(self, text: str) -> None:
        """Show a text that no file may contain: on a terminal only, and on one line, so that it can be copied."""
        if self._aside.is_terminal:
            self._aside.print(Text(without_controls(text)), soft_wrap=True)

    def tick(self) -> None:
        """Read the live files; without a terminal print a line of progress: every five seconds at first, and
        every minute after twenty minutes."""
        for sentence in self._live.look():
            self.note(sentence)
        if self._status_line is not None:
            self._status_line(str(self._live.progress))
        elif not self._console.is_terminal and (now := self._clock()) >= self._next_plain:
            self._next_plain = now + min(max(PLAIN_SECONDS, (now - self._began) / 20), LONGEST_PLAIN_SECONDS)
            self._aside.print(f"gossamer: {self._live.progress}", soft_wrap=True, markup=False, highlight=False)
            if self._bar is not None:
                self._aside.print(self._bar, soft_wrap=True)

    def table(self, record: Record, files: Mapping[str, str]) -> None:
        """Show the closing table after any end of the run. files: written files by their content."""
        self._console.print()
        if self._console.is_terminal:
            self._console.print(_grid(record, files))
            return
        for name, value in rows(record, files):
            self._console.print(without_controls(f"{name:<26}{value}"), soft_wrap=True, markup=False)

    @property
    def _bar(self) -> Text | None:
        """The latest rewritten line, such as a progress bar, of the first worker that has one."""
        shown = {rank: text for rank, text in self._rewritten.items() if text.strip()}
        return _of_rank(min(shown), shown[min(shown)]) if shown else None

    def _status(self) -> Group:
        width = max(self._console.width - 4, 10)
        status = Text(str(self._live.progress), style="dim", no_wrap=True, overflow="ellipsis")
        status.truncate(width, overflow="ellipsis")
        self._spinner.update(text=status)
        if (bar := self._bar) is None:
            return Group(self._spinner)
        bar.truncate(self._console.width - 1, overflow="ellipsis")
        return Group(bar, self._spinner)


def _of_rank(rank: int, text: str) -> Text:
    prefix = f"[rank {rank}] ", RANK_STYLES[rank % len(RANK_STYLES)]
    return Text.assemble(prefix, Text.from_ansi(text, end=""))


def rows(record: Record, files: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Rows of the closing table: the run, its speed, its traffic, and its quality."""
    times, memory = record["seconds_per_step"], record["memory_bytes"]
    busy = record["compute_seconds_per_step"] + record["waiting_seconds_per_step"]
    skipped = f" ({record['skipped_steps']} skipped)" if record["skipped_steps"] else ""
    finished = record.get("ended", "finished") == "finished"
    if not finished:
        yield "ended", record["ended"]
    yield "recipe", record["recipe"]
    yield "workers", str(record["workers"])
    for name, what in (("lost", "of them lost"), ("left", "of them left")):
        if ranks := record.get(name):
            yield what, ranks_text(ranks)
    if network := network_text(record):
        yield "network", network
    if record.get("sessions", 1) > 1:
        yield "sessions", SESSIONS.format(count=record["sessions"])
    yield "parameters", count_text(record["parameters"])
    resumed = f", from {record['resumed_at']} on," if record.get("resumed_at") else ""
    yield "steps", f"{record['steps']}{skipped}{resumed} in {seconds_text(record['seconds'])}"
    yield "time per step", f"median {seconds_text(times['median'])}, 90 % within {seconds_text(times['p90'])}"
    yield "waiting", share_text(record["waiting_seconds_per_step"] / busy if busy else 0.0)
    yield "sent per step and worker", bytes_text(record["bytes_sent_per_step"]["accounted"])
    if record["bytes_sent_per_step"].get("interface"):
        yield "by the interface's count", bytes_text(record["bytes_sent_per_step"]["interface"])
    yield "peak memory", bytes_text(memory["peak_resident"])
    for name, value in record["final"].items():
        yield f"final {in_one_line(name)}", short(value) if value is not None else "not a number"
    apart = APART if record["workers_agree"] is True and record.get("workers_hold_merged") is False else ""
    truncated = ranks_text(record.get("truncated", ()))
    if truncated:
        yield "incomplete", TRUNCATED.format(ranks=truncated)
    if finished and truncated and record["workers_agree"] is None:
        yield "workers agree", UNRECORDED.format(ranks=truncated)
    elif finished:
        yield "workers agree", AGREE[record["workers_agree"]] + apart + _differing(record.get("differing_tensor"))
    yield from files.items()


def _differing(found: Record | None) -> str:
    """The tensor that differs between ranks, and the ranks with each value."""
    if not found:
        return ""
    by_hash: dict[str, list[str]] = {}
    for rank, text in found["hashes"].items():
        by_hash.setdefault(text or "absent", []).append(rank)
    held = "; ".join(f"{text[:8]} on {ranks_text(each)}" for text, each in by_hash.items())
    more = f", and {found['others']} more" if found["others"] else ""
    hint = LOCAL_STATISTICS if found["name"].rpartition(".")[2] in STATISTICS else ""
    hint = CHANGED_FROZEN if found.get("frozen") else hint
    return f': "{in_one_line(found["name"])}" differs ({held}){more}{hint}'


def _grid(record: Record, files: Mapping[str, str]) -> Table:
    shown = Table.grid(padding=(0, 2))
    shown.add_column(style="dim", no_wrap=True)
    shown.add_column(overflow="fold")
    for name, value in rows(record, files):
        alarm = name == "workers agree" and value.startswith("no")
        shown.add_row(name, Text(without_controls(value), style="bold red" if alarm else ""))
    return shown
