"""Coordinator of 100, 1,000 and 10,000 members in virtual time: a join, a loss, and 10 % churn a minute.

The coordinator and the members' scripts are the real ones; clock and network are simulated (many_members_run.py). Only
the cost of a heartbeat is measured on real connections. Writes a part of docs/benchmarks/many-members.md.

    python benchmarks/many_members.py [--members 100 1000 10000] [--seeds 3]
    python benchmarks/many_members.py --quick      # 20 and 50 members, into runs/quick
"""

import argparse
import gc
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.many_members_run import ManyMembers, rounds_completed, shared_parsing  # found only after the line above
from benchmarks.page import put_between
from benchmarks.provenance import ROOT, provenance, scratch

from gossamer.base.peer_ops import WORKER, Arrived, Await, Peer, PeerScript, Pull, Pulled, Push, Reply, Stamp
from gossamer.base.units import bytes_text, seconds_text
from gossamer.comm.elastic.agent import BEATS
from gossamer.comm.membership.coordinator import Coordinator
from gossamer.comm.membership.journal import MemoryJournal
from gossamer.comm.membership.messages import ATTACHED, COORDINATOR, HERE, NEWS, WorkerReport
from gossamer.comm.membership.next_view import CoordinatorOptions, ViewPolicy
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc_protocol.credentials import Credentials
from gossamer.comm.rpc_protocol.messages import PING

PAGE = ROOT / "docs" / "benchmarks" / "many-members.md"
CHURN_A_MINUTE = 0.1
LOCK_STEP = "needs all members"
FINGERPRINT = '{"recipe": "LocalSGD(period=100) + Groups(size=8)", "torch": "2.13.0"}'
CHANGES = ("first view", "one join", "one loss")
CHURN_SECONDS = 60.0
SYNC_SECONDS = (0.1, 1.0)  # of a step that needs all members
LOCAL_SECONDS = 10.0  # of local steps between two synchronizations
DEAD_AFTER_SECONDS = 5.0


@dataclass(frozen=True)
class Cost:
    """What a change took."""

    virtual_seconds: float
    messages: int
    sent_bytes: int
    received_bytes: int
    cpu_seconds: float


@dataclass(frozen=True)
class Churn:
    """Losses and arrivals for some time."""

    views: int
    seconds: float
    messages: int
    nbytes: int
    cpu_seconds: float
    active_share: float
    steps: dict[float, float]  # by seconds of a step that needs all members: completed ones, as a share of the time
    rounds: dict[float, float]  # by seconds of a synchronization: rounds with local steps, as a share of those in time
    settled_seconds: float  # until all agree, after the last change


@dataclass(frozen=True)
class Size:
    """All measurements with a number of members."""

    changes: list[dict[str, Cost]]  # by seed
    churn: dict[str, Churn]  # by what a step needs
    held: tuple[int, int]


def measured(run: ManyMembers, act: Callable[[], object]) -> Cost:
    """Cost of a change, until all members have the view after it."""
    gc.collect()
    before = 0 if run.rule.view is None else run.rule.view.number
    messages, nbytes, cpu = run.messages, dict(run.bytes), run.cpu_seconds
    act()
    seconds = run.run(lambda: run.rule.view is not None and run.rule.view.number > before and run.agreed, 600)
    moved = {name: value - nbytes.get(name, 0) for name, value in run.bytes.items()}
    sent = sum(value for name, value in moved.items() if name.startswith("sent"))
    return Cost(seconds, run.messages - messages, sent, sum(moved.values()) - sent, run.cpu_seconds - cpu)


def changes(members: int, seed: int) -> tuple[ManyMembers, dict[str, Cost]]:
    run = ManyMembers(members, seed)
    found = {CHANGES[0]: measured(run, lambda: None)}
    run.run(seconds=2.0)
    found[CHANGES[1]] = measured(run, run.arrive)
    run.run(seconds=10.0)
    found[CHANGES[2]] = measured(run, lambda: run.lose(run.random.choice(run.members)))
    run.run(seconds=10.0)
    return run, found


def begun(members: int, lock_step: bool) -> ManyMembers:
    """A run in which all members have had their first view for some time."""
    run = ManyMembers(members, lock_step=lock_step)
    run.run(lambda: run.agreed, 600)
    run.run(seconds=10.0)
    return run


def churned(run: ManyMembers, seconds: float) -> Churn:
    gc.collect()
    assert run.rule.view is not None
    view, messages, nbytes = run.rule.view.number, run.messages, run.bytes.total()
    cpu, active = run.cpu_seconds, run.active_seconds
    run.churn(CHURN_A_MINUTE, seconds)
    run.run(seconds=seconds)
    found = run.rule.view.number - view, run.messages - messages, run.bytes.total() - nbytes
    share = (run.active_seconds - active) / seconds
    spans, end = run.agreements_until_now(), run.now

    def completed(local: float, sync: float) -> float:
        """The rounds of this time, relative to a run without changes."""
        return rounds_completed(spans, end - seconds, end, local, sync) / int(seconds / (local + sync))

    steps = {sync: completed(0.0, sync) for sync in SYNC_SECONDS}
    rounds = {sync: completed(LOCAL_SECONDS, sync) for sync in SYNC_SECONDS}
    cpu = run.cpu_seconds - cpu
    settled = run.run(lambda: _settled(run), 600)
    if not _settled(run):
        raise SystemExit(f"{run.rule.initial} members do not agree 600 s after the last change")
    return Churn(found[0], seconds, found[1], found[2], cpu, share, steps, rounds, settled)


def _settled(run: ManyMembers) -> bool:
    return run.agreed and len(run.members) == sum(each.is_alive for each in run.workers.values())


def memory(members: int) -> tuple[int, int]:
    """Bytes that the coordinator holds once all members have the first view, and at most until then."""
    tracemalloc.start()
    try:
        options = CoordinatorOptions(least=1, most=2 * members, initial=members)
        rule = ViewPolicy(options, journal=MemoryJournal(), note=lambda text: None)
        coordinator = Coordinator(rule)
        for number in range(members):
            report = WorkerReport(number=2**62 + number, host=f"10.0.{number // 256}.{number % 256}", port=1, place=-1)
            _hear(coordinator, report, HERE)
            poll = Pull(of=COORDINATOR, key=f"{NEWS}/{report.number}", known=-1)
            coordinator.react(Arrived(moment=0.0, token=number, sender=Peer(WORKER, report.number), op=poll))
        for worker in list(rule.workers.values()):
            text = FINGERPRINT[:-1] + "}"  # another object for each, as from a connection
            about = WorkerReport(number=worker.number, host="h", port=1, place=-1, view=1, fingerprint=text)
            _hear(coordinator, about, ATTACHED)
            poll = Pull(of=COORDINATOR, key=f"{NEWS}/{worker.number}/1", known=2)
            coordinator.react(Arrived(moment=0.0, token=worker.number, sender=Peer(WORKER, worker.number), op=poll))
        gc.collect()
        return tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def _hear(coordinator: Coordinator, report: WorkerReport, key: str) -> None:
    op = Push(to=COORDINATOR, key=key, stamp=Stamp(report.number, 0), about=report.text())
    coordinator.react(Arrived(moment=0.0, token=0, sender=Peer(WORKER, report.number), op=op))


def heartbeat_seconds(connections: int, beat_seconds: float = 0.1, seconds: float = 8.0) -> float:
    """CPU seconds of the coordinator's connection thread for each heartbeat that it sends or receives, on loopback."""

    def credentials(me: Peer) -> Credentials:
        return Credentials(me=me, token=bytes(32), run="elastic", largest_frame_bytes=2**22)

    def ask() -> PeerScript:
        yield Pull(of=COORDINATOR, key="here", within_seconds=120)

    with ExitStack() as stack:
        options = EndpointOptions(heartbeat_seconds=beat_seconds)
        server = stack.enter_context(TcpEndpoint(credentials(COORDINATOR), options))
        peers = [Peer(WORKER, number) for number in range(connections)]
        workers = [stack.enter_context(TcpEndpoint(credentials(peer), options)) for peer in peers]
        asked = []
        for worker in workers:
            worker.meet({COORDINATOR: server.address})
            asked.append(worker.start(ask()))
        for _ in workers:
            while not isinstance(event := server.answer(Await(until=time.monotonic() + 120)), Arrived):
                pass
            server.answer(Reply(token=event.token, answer=Pulled(version=0)))
        for each in asked:
            each.wait(120)
        clock = time.pthread_getcpuclockid(server._thread.ident or 0)
        time.sleep(2 * beat_seconds)
        before, frames = time.clock_gettime(clock), _frames(server)
        time.sleep(seconds)
        return (time.clock_gettime(clock) - before) / (_frames(server) - frames)


def _frames(server: TcpEndpoint) -> float:
    """Heartbeats, if nothing else was sent."""
    each = server.statistics().values()
    return sum(one.overhead_bytes_received + one.overhead_bytes_sent for one in each) / PING.frame_bytes


# -- page --------------------------------------------------------------------------------------------------------------


def change_table(sizes: dict[int, Size]) -> Iterator[str]:
    heads = ("virtual seconds", "messages", "a member", "sent", "sent a member", "received", "coordinator's CPU")
    yield f"| members | change | {' | '.join(heads)} |"
    yield f"|---:|---|{'---:|' * len(heads)}"
    for members, found in sizes.items():
        for name in CHANGES:
            each = [costs[name] for costs in found.changes]
            messages, sent = fmean(one.messages for one in each), fmean(one.sent_bytes for one in each)
            cells = [
                f"{members:,}",
                name,
                _range([one.virtual_seconds for one in each], "{:.2f}"),
                f"{messages:,.0f}",
                f"{messages / members:.1f}",
                bytes_text(sent),
                bytes_text(sent / members),
                bytes_text(fmean(one.received_bytes for one in each)),
                seconds_text(fmean(one.cpu_seconds for one in each)),
            ]
            yield f"| {' | '.join(cells)} |"


def churn_table(sizes: dict[int, Size]) -> Iterator[str]:
    steps = [f"steps of {each:g} s" for each in SYNC_SECONDS]
    rounds = [f"{LOCAL_SECONDS:g} s of local steps + {each:g} s" for each in SYNC_SECONDS]
    heads = ["virtual seconds", "views", "messages/s", "bytes/s", "coordinator's CPU", "view is active"]
    heads += [*steps, *rounds, "agree after"]
    yield f"| members | step | {' | '.join(heads)} |"
    yield f"|---:|---|{'---:|' * len(heads)}"
    every = [(members, step, each) for members, found in sizes.items() for step, each in found.churn.items()]
    for members, step, each in every:
        cells = [
            f"{members:,}",
            step,
            f"{each.seconds:g}",
            f"{each.views}",
            f"{each.messages / each.seconds:,.0f}",
            bytes_text(each.nbytes / each.seconds),
            f"{each.cpu_seconds / each.seconds:.1%} of a core",
            f"{each.active_share:.0%} of the time",
            *(f"{share:.0%}" if step == LOCK_STEP else "-" for share in (*each.steps.values(), *each.rounds.values())),
            f"{each.settled_seconds:.2f} s",
        ]
        yield f"| {' | '.join(cells)} |"


def rest_table(sizes: dict[int, Size], beat: float) -> Iterator[str]:
    heads = ("held", "a member", "at most, with the first view", "heartbeats/s", "CPU for heartbeats")
    yield f"| members | {' | '.join(heads)} |"
    yield f"|---:|{'---:|' * len(heads)}"
    for members, found in sizes.items():
        now, peak = found.held
        beats = 2 * members * BEATS / DEAD_AFTER_SECONDS
        cells = [
            bytes_text(now),
            bytes_text(now / members),
            bytes_text(peak),
            f"{beats:,.0f}",
            f"{beats * beat:.1%} of a core",
        ]
        yield f"| {members:,} | {' | '.join(cells)} |"


def _range(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def size(members: int, seeds: int) -> Size:
    with shared_parsing():
        found = []
        for seed in range(1 if members >= 10_000 else seeds):
            run, costs = changes(members, seed)
            found.append(costs)
            print(members, seed, costs, file=sys.stderr, flush=True)
        churn = {LOCK_STEP: churned(run, CHURN_SECONDS)}
        churn["needs servers only"] = churned(begun(members, lock_step=False), CHURN_SECONDS)
    print(members, churn, file=sys.stderr, flush=True)
    return Size(found, churn, memory(members))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--seeds", type=int, default=3, help="for fewer than 10,000 members; one above")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.members, args.seeds = [20, 50], 1
    written = provenance()  # of the code that is about to run
    beat = heartbeat_seconds(10 if args.quick else 100, seconds=1.0 if args.quick else 8.0)
    print(f"{beat * 1e6:.1f} us a heartbeat", file=sys.stderr, flush=True)
    with ProcessPoolExecutor(len(args.members), mp_context=get_context("spawn")) as pool:
        sizes = dict(zip(args.members, pool.map(size, args.members, repeat(args.seeds)), strict=True))
    page = scratch(PAGE) if args.quick else PAGE
    parts = [written, "### One change", *["\n".join(change_table(sizes))]]
    parts += ["### 10 % of the members lost, and as many new ones, a minute", "\n".join(churn_table(sizes))]
    parts += [f"### At rest\n\nA heartbeat takes {beat * 1e6:.0f} µs of CPU time.", "\n".join(rest_table(sizes, beat))]
    put_between(page, "coordinator", "\n\n".join(parts))
    print(page)


if __name__ == "__main__":
    main()
