"""Training by `gossamer run`: checks of the options together, the launch, the record, and how to resume.

Modules for options that few runs have are imported when they are needed: all workers wait for this module's imports.
"""

from __future__ import annotations

import platform
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gossamer.base import system
from gossamer.base.compiled import remedy
from gossamer.base.figures import check_matplotlib
from gossamer.base.run_files import RunFiles, Stage
from gossamer.cli.console import print_text
from gossamer.cli.emulation import Emulation, emulate, enter, schedule
from gossamer.cli.forecast_file import Forecast, read_forecast, verdict
from gossamer.cli.launchers import check_emulation, elastic_starter, read_elasticity, read_serving, starter
from gossamer.cli.log_folder import new_logs, next_logs, private_directory
from gossamer.cli.options import ElasticOptions, Machines, Tracing, check_installed, first_workers, most_workers
from gossamer.cli.program import TrainingProgram, with_misplaced_options
from gossamer.comm.bandwidth.limits import MachineLimits
from gossamer.comm.environment.run_token import read_token
from gossamer.comm.network import Network
from gossamer.comm.runtime.signal_handlers import handling
from gossamer.comm.tls_contexts import Tls, tls_contexts
from gossamer.errors import PeerLost
from gossamer.events import Ended
from gossamer.launcher.failure import Failure, Origin, Outcome
from gossamer.launcher.job import NO_SERVERS, Elasticity, Job, Serving, Spawn, WorkerRange, spawn
from gossamer.launcher.preemption_notice import PreemptionWatch, notices_of
from gossamer.launcher.process_logs import log_path
from gossamer.launcher.rendezvous import Met, ignore_peer
from gossamer.launcher.signal_forwarding import FORWARDED, SignalForwarder
from gossamer.launcher.stack_dumps import StackRequests
from gossamer.launcher.startup import Startup
from gossamer.launcher.supervisor import handled_stop_signal
from gossamer.observe import record as records
from gossamer.observe.control_sequences import SafeConsole, without_controls
from gossamer.observe.live import LiveView
from gossamer.observe.telemetry import Collector, GlobalRanks, MachineDesk
from gossamer.observe.terminal import Terminal
from gossamer.plan.emulation import EmulationPlan, Fault, Schedule, read_fault
from gossamer.version import __version__

if TYPE_CHECKING:
    from gossamer.launcher.bandwidth_keeper import BandwidthKeeper
    from gossamer.observe.telemetry.uplink import Uplink

WORKERS_NEED = ("msgspec", "safetensors")  # this process does not need them


def run_training(
    *,
    workers: int | WorkerRange,
    servers: int,
    recipe: str | None,
    collective: str | None,
    congestion: str | None,
    json_file: Path | None,
    plot_file: Path | None,
    log_to: str | None,
    logs: Path | None,
    max_restarts: int,
    grace_seconds: float,
    preemption_notice: str | None,
    token_file: Path | None,
    tls: Path | None,
    as_horovod: bool,
    watch: bool,
    forecast_file: Path | None,
    network_text: str | None,
    fault_texts: tuple[str, ...],
    elastic: ElasticOptions,
    limits: MachineLimits | None,
    tracing: Tracing,
    dry_run: bool,
    machines: Machines,
    program: TrainingProgram,
    begin: Spawn = spawn,
) -> int:
    """Run a script with the options of `gossamer run`, by their names. Return the exit code.

    begin: starts a worker.

    Raises click.ClickException for contradicting options, and GossamerError.
    """
    elasticity = read_elasticity(
        workers, machines, elastic, tls=tls, token_file=token_file, servers=servers, network_text=network_text
    )
    if recipe is not None:
        from gossamer.cli.script_terms import refuse_unknown_terms

        refuse_unknown_terms(recipe, program.script, program.as_module, servers=servers)
    if isinstance(workers, int) and elasticity is None:
        tracing.check_ranks(workers * machines.nodes)
    forecast, serving = read_forecast(forecast_file), read_serving(servers, machines)
    faults = tuple(read_fault(text, most_workers(workers), servers) for text in fault_texts)
    network = machines.emulated(network_text, most_workers(workers) + servers)
    check_installed(*WORKERS_NEED)
    if limits is not None:
        check_limits(limits, network, collective)
    if plot_file is not None:
        check_matplotlib()
    planned = None if dry_run else enter(network, faults, relays=elastic.relay)
    check_emulation(elasticity, planned)
    logs = logs or (next_logs() if dry_run else new_logs())
    job = Job(
        **vars(program),
        workers=first_workers(workers),
        **vars(machines),
        recipe=recipe,
        token_file=token_file,
        max_restarts=max_restarts,
        grace_seconds=grace_seconds,
        logs=logs,
        seals=tls is None and machines.nodes > 1 and elastic.encryption.is_needed(machines.hosts()),
        worker_module="gossamer.cli.worker",
        keeps_standby=True,
        begin=begin,
        settings=_settings(
            GOSSAMER_COLLECTIVE=collective,
            GOSSAMER_CONGESTION=congestion,
            GOSSAMER_TLS=tls,
            GOSSAMER_LOG_TO=log_to,
            GOSSAMER_AS_HOROVOD="1" if as_horovod else None,
        )
        | tracing.settings(logs),
    )
    if dry_run:
        from gossamer.cli.dry_run import show_plan

        show_plan(job, serving, elasticity, network, fault_texts, [file for file in (json_file, plot_file) if file])
        return 0
    with _page(job.logs) if watch else nullcontext():
        around = Surroundings(network, planned, faults, serving, elasticity, forecast, preemption_notice, limits)
        return run_job(job, around, json_file, plot_file)


def _page(logs: Path) -> AbstractContextManager[None]:
    from gossamer.cli.watch import served_page

    return served_page(logs)


def check_limits(limits: MachineLimits, network: Network | None, collective: str | None) -> None:
    """Refuse limits that could not be kept. Raises click.ClickException, and GossamerError if the cap is used up."""
    from gossamer.comm.bandwidth.shared_buckets import available
    from gossamer.comm.mesh.collective_selector import ENGINE
    from gossamer.launcher.bandwidth_keeper import check_cap

    if network is not None:
        raise click.UsageError(
            "--network emulates all machines on this one, and limits are of this one: write the limits as the rate of "
            "the network, such as --network 5mbit,20ms."
        )
    if collective == ENGINE:
        raise click.UsageError(
            "bandwidth limits do not apply to the process group's own collectives: leave out --collective engine."
        )
    if not available():
        raise click.ClickException(f"bandwidth limits need the compiled loops, which are missing. {remedy()}.")
    check_cap(limits)


def _settings(**options: object) -> dict[str, str]:
    """Environment variables of the workers for the options that were given."""
    return {name: str(value) for name, value in options.items() if value}


@dataclass(frozen=True)
class Surroundings:
    """Network, faults, servers and elasticity of a run."""

    network: Network | None  # to emulate; None for none
    planned: EmulationPlan | None  # of the emulation
    faults: tuple[Fault, ...] = ()
    serving: Serving | None = None  # None without dedicated servers
    elasticity: Elasticity | None = None  # None for a fixed number of workers
    forecast: Forecast = field(default_factory=dict)  # empty without the option
    preemption_notice: str | None = None  # the source of notices; None to request none
    limits: MachineLimits | None = None  # of this machine's bandwidth; None for none


def run_job(
    job: Job,
    around: Surroundings,
    json_file: Path | None = None,
    plot_file: Path | None = None,
    *,
    explain: Callable[[Job, Outcome, dict[str, object] | None], None] | None = None,
    status: Callable[[str], None] | None = None,
) -> int:
    """Run a job to its end, show and record it. Return the exit code.

    Args:
        job: the program, its processes and machines.
        around: its network, faults, servers and elasticity.
        json_file: a second file for the record.
        plot_file: file for a picture of its curves.
        explain: called with the job, the outcome and the last checkpoint unless the run finished. None prints them.
        status: shows the line of progress where there is no terminal, as in a notebook. None prints it now and then.
    """
    in_terminal = None if status is None else False  # a notebook's output claims to be one
    console = SafeConsole(highlight=False, force_jupyter=False, force_terminal=in_terminal)
    aside = SafeConsole(stderr=True, highlight=False)
    with private_directory(job.logs) as directory:
        live = LiveView(directory, job.local_ranks, Startup(job, RunFiles(directory)))
        terminal = Terminal(live, console, aside if status is None else console, status=status)
        facts = _facts(job, around)
        stacks = StackRequests(RunFiles(directory), job.logs, terminal.note)
        forwarder = SignalForwarder(RunFiles(directory), stacks, terminal.note)
        preempted = ""
        with handling(forwarder, *FORWARDED):
            try:
                with (
                    _limited(around.limits, directory, job.logs, terminal.note) as keeper,
                    machine_links(job, around.elasticity, terminal.note) as links,
                    Collector(job.logs, directory, facts, terminal.note, links.others, links.uplink) as collector,
                    emulate(around.network, around.planned, terminal.note) as emulation,
                ):
                    faults = schedule(around.faults, emulation, directory, terminal.note)
                    start = (
                        elastic_starter(
                            job,
                            around.elasticity,
                            emulation,
                            live,
                            links.others,
                            terminal.show_secret,
                            around.serving or NO_SERVERS,
                        )
                        if around.elasticity is not None
                        else starter(job, around.serving, emulation, links.met)
                    )
                    note = collector.notes_recorded_by(terminal.note)
                    ticks: list[Callable[[], None]] = [terminal.tick, forwarder.tick]
                    ticks.append(partial(_inject, faults, emulation, live))
                    if keeper is not None:
                        ticks.append(partial(_report_limits, keeper, collector))
                    with preemption_watch(around.preemption_notice, note) as preemption, terminal.progress():
                        if preemption is not None:
                            ticks.append(preemption.tick)
                        outcome = start(directory, show=terminal.line, note=note, tick=lambda: _call_all(ticks))
                    for text in faults.not_begun:
                        terminal.note(f"{text} was not injected: training ended before its time.")
                    if preemption is not None and preemption.reason:
                        preempted = preemption.reason
                        collector.report("facts", facts={"preempted": preempted})
                    stacks.keep()
                    network = emulation.record()
                    collector.ended(_ended(outcome))
            except PeerLost as lost:  # a server that cannot be restarted
                report(job, directory, records.NO_NETWORK, "failed", terminal, json_file, plot_file)
                print_text(f"\n{lost}", error=True)
                explain_continuation(live.progress.checkpoint)
                return 1
            record = report(job, directory, network, _ended(outcome), terminal, json_file, plot_file, preempted)
            if record is not None and (options := verdict(around.forecast, record)):
                terminal.note(options)
            if outcome.exit_code:
                (explain or explain_end)(job, outcome, live.progress.checkpoint)
    return outcome.exit_code


def _call_all(ticks: Sequence[Callable[[], None]]) -> None:
    for tick in ticks:
        tick()


def _inject(faults: Schedule, emulation: Emulation, live: LiveView) -> None:
    """Inject the faults that are due."""
    seconds = emulation.training_seconds(live.progress.attached is not None)
    if seconds is not None:
        faults.tick(seconds)


def _report_limits(keeper: BandwidthKeeper, collector: Collector) -> None:
    """Apply changed limits, and record them."""
    if keeper.tick():
        collector.report("facts", facts={"limits": str(keeper.limits)})


def _limited(
    limits: MachineLimits | None, directory: Path, logs: Path, note: Callable[[str], None]
) -> AbstractContextManager[BandwidthKeeper | None]:
    """Limits for this process and the workers that it starts; None without limits."""
    if limits is None:
        return nullcontext()
    from gossamer.launcher.bandwidth_keeper import keep_limits

    return keep_limits(limits, directory, logs, note, _stop)


def preemption_watch(source: str | None, note: Callable[[str], None]) -> AbstractContextManager[PreemptionWatch | None]:
    """A watch that stops this launcher as Ctrl-C does; None without a source."""
    return nullcontext() if source is None else PreemptionWatch(notices_of(source), _stop, note)


def _stop() -> None:
    """Stop this launcher by a signal that it handles."""
    if (number := handled_stop_signal()) is not None:
        system.stop_this_process(number)


def _facts(job: Job, around: Surroundings) -> dict[str, object]:
    """Facts of a run that are known before it begins."""
    return {
        "workers": job.workers * job.nodes,
        "servers": 0 if around.serving is None else around.serving.servers,
        "script": job.command,
        "machine": socket.gethostname(),
        "network": None if around.network is None else around.network.text,
        **({} if around.limits is None else {"limits": str(around.limits)}),
        "versions": {"gossamer": __version__, "python": platform.python_version()},
        **around.forecast,
    }


def _ended(outcome: Outcome) -> Ended:
    if outcome.signal is not None or outcome.resumable:
        return "interrupted"
    return "failed" if outcome.exit_code else "finished"


FAREWELL_SECONDS = 5.0  # all machines end together; a lost one sends nothing more


@dataclass(frozen=True, kw_only=True)
class MachineLinks:
    """others: serves other machines' launchers; uplink: to the first machine; met: called after the rendezvous."""

    others: MachineDesk | None = None
    uplink: Uplink | None = None
    met: Met = ignore_peer


@contextmanager
def machine_links(job: Job, elasticity: Elasticity | None, note: Callable[[str], None]) -> Iterator[MachineLinks]:
    """Context manager: the links of this launcher to others."""
    if elasticity is not None:
        yield MachineLinks(others=MachineDesk(), uplink=_to_elastic_run(job, elasticity))
        return
    if job.nodes == 1:
        yield MachineLinks()
        return
    from gossamer.observe.telemetry.meeting import FirstMachine, OtherMachine
    from gossamer.observe.telemetry.uplink import Uplink

    if job.node_rank:
        way = OtherMachine(_token(job), _tls(job), note)
        yield MachineLinks(uplink=Uplink(way.line), met=way.met)
    else:
        desk = MachineDesk(numbering=GlobalRanks, patience_seconds=FAREWELL_SECONDS)
        with closing(FirstMachine(desk, _token(job), _tls(job), note)) as first:
            yield MachineLinks(others=desk, met=first.met)


def _to_elastic_run(job: Job, elasticity: Elasticity) -> Uplink | None:
    """Link of a launcher that joins another's run."""
    token = _token(job)
    if elasticity.coordinator is None or token is None:
        return None
    from gossamer.observe.telemetry.uplink import Uplink, to_coordinator

    return Uplink(partial(to_coordinator, elasticity.coordinator, token, _tls(job)))


def _token(job: Job) -> bytes | None:
    return None if job.token_file is None else read_token(job.token_file)


def _tls(job: Job) -> Tls | None:
    return tls_contexts(job.settings.get("GOSSAMER_TLS"))


USAGE_ERROR = 2  # the exit code of argparse and click for unknown arguments
NEVER_ATTACHED = (
    "{script} never called gossamer.attach, so there are no numbers to show. Add this line before the "
    "training loop: session = gossamer.attach(model, optimizer)"
)
WITHOUT_SESSION = (
    "{script} ran without a session, so there are no numbers to show: they come from gossamer.attach(model, "
    "optimizer), which remote modules, pipeline boundaries and gossamer.ddp_hook do not use"
)
NOT_WRITTEN = (
    "the record could not be written to {file} ({reason}), so only this table exists. The event logs are kept in the "
    "folder of logs; after freeing space, `gossamer record {logs}` makes the record from them."
)
REMOVED = (
    "{logs} was removed during the run, together with the reports of its ranks, so there is no record. Training was "
    "not interrupted."
)


def report(
    job: Job,
    directory: Path,
    network: records.Record,
    ended: Ended,
    terminal: Terminal,
    json_file: Path | None,
    plot_file: Path | None,
    preempted: str = "",
) -> records.Record | None:
    """Write the run's record, draw its plot, and show its table. Return the record; None without one.

    preempted: the notice of the preemption that ended the run; empty without one.
    """
    if not directory.exists():
        terminal.note(REMOVED.format(logs=job.logs))
        return None
    ranks = records.read_ranks(directory)
    if not ranks:
        if ended == "finished":
            text = WITHOUT_SESSION if _communicated(job, directory) else NEVER_ATTACHED
            terminal.note(text.format(script=job.name or job.script))
        records.discard_logs(directory)
        return None
    record = records.merge(ranks, network, ended, preempted)
    kept = job.logs / "record.json"
    files = {"record": str(json_file or kept), "logs": str(job.logs)}
    try:
        for file in {kept, json_file or kept}:
            records.write(file, record)
        records.discard_logs(directory)
    except OSError as error:
        terminal.note(NOT_WRITTEN.format(file=files.pop("record"), reason=error.strerror, logs=job.logs))
    if plot_file is not None:
        from gossamer.observe.plot import plot

        plot([record], plot_file)
        files["picture"] = str(plot_file)
    terminal.table(record, files)
    return record


def _communicated(job: Job, directory: Path) -> bool:
    """Whether a worker of this machine used Gossamer without a session."""
    files, stages = RunFiles(directory), (Stage.OTHERWISE, Stage.CALLED)
    return any(files.has_ever_reached(stage, rank) for stage in stages for rank in job.local_ranks)


def explain_end(job: Job, outcome: Outcome, checkpoint: dict[str, object] | None) -> None:
    """Print why a run did not finish, and how to resume it from its checkpoint, if there is one."""
    if outcome.failure is not None:
        _explain_failure(job, outcome.failure)
    elif outcome.signal is not None:
        print_text(f"\nStopped by {signal.Signals(outcome.signal).name}; all workers have ended.\nLogs: {job.logs}")
    elif outcome.resumable:
        print_text(f"\n{outcome.resumable}. The remaining workers have ended.\nLogs: {job.logs}", error=True)
        if checkpoint is None:
            print_text(
                "No checkpoint was saved, so the same command starts from scratch: session.save(DIRECTORY) saves one."
            )
    explain_continuation(checkpoint)


def explain_continuation(checkpoint: dict[str, object] | None) -> None:
    if checkpoint is not None:
        where, step = checkpoint["directory"], checkpoint["step"]
        print_text(
            f"A checkpoint of step {step} is in {where}. A script that calls session.load({str(where)!r}) continues "
            "from it when the same command is run again:"
        )
        click.echo(f"  {shlex.join(['gossamer', *sys.argv[1:]])}", err=True)


def _explain_failure(job: Job, failure: Failure) -> None:
    text = str(failure)
    if failure.origin is Origin.ENDED and failure.exit_code == USAGE_ERROR:
        text = with_misplaced_options(text, job.arguments)
    if "No module named 'horovod'" in text:
        text += "\nTo import gossamer.horovod in its place, write: gossamer run --as-horovod"
    print_text(f"\n{without_controls(text)}", error=True)
    if failure.traceback:
        click.echo(f"\n{without_controls(failure.traceback)}", err=True)
    others = job.workers - 1
    if others:
        text = f"The other {others} workers were" if others > 1 else "The other worker was"
        print_text(f"{text} stopped, unless already finished.")
    print_text(f"Log of rank {failure.rank}: {log_path(job.logs, failure.rank)}")
