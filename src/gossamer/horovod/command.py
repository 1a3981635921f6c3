"""Command `python -m gossamer.horovod`: starts a Horovod script as horovodrun does, on Gossamer's launcher.

    python -m gossamer.horovod -np 4 python train.py --epochs 3
    python -m gossamer.horovod -np 4 --recipe "TopK(0.01)" train.py

horovodrun's common options are accepted. Within a job of mpirun, srun or torchrun the script runs in this process.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

SEVERAL_HOSTS = (
    "several hosts are started one by one. On each of them run: gossamer run --as-horovod --workers N --nnodes M "
    "--node-rank I --rendezvous HOST:29617 train.py"
)
ELASTIC = (
    "the number of workers is fixed. Write -np 4 --recipe ... with gossamer run --as-horovod --max-restarts 3: "
    "hvd.elastic.run then continues from its last commit"
)


def parser() -> argparse.ArgumentParser:
    """The options of horovodrun that are accepted."""
    options = argparse.ArgumentParser(prog="python -m gossamer.horovod", allow_abbrev=False, description=__doc__)
    options.add_argument("-np", "--num-proc", type=int, help="how many workers to start")
    options.add_argument("-H", "--hosts", help="localhost:N; other hosts are refused with the line to write")
    options.add_argument("--recipe", help="how the workers communicate, such as 'TopK(0.01)'")
    options.add_argument("--network-interface", "--network-interfaces", help="the network interface to use")
    options.add_argument("--verbose", action="store_true", help="accepted: output of all workers is kept in files")
    options.add_argument(
        "--gloo", action="store_true", help="accepted: processors communicate by Gossamer's connections"
    )
    options.add_argument("--mpi", action="store_true", help="refused")
    options.add_argument("--jsrun", action="store_true", help="refused")
    options.add_argument("--timeline-filename", help="write the timeline of calls there")
    options.add_argument("--timeline-mark-cycles", action="store_true", help="mark rounds of negotiation in it")
    options.add_argument("--fusion-threshold-mb", type=float, help="up to how many MiB allreduces travel as one")
    options.add_argument("--cycle-time-ms", type=float, help="how long a round waits for more calls")
    options.add_argument("--start-timeout", type=int, help="seconds to wait for all workers")
    options.add_argument("--min-np", "--min-num-proc", help="refused")
    options.add_argument("--max-np", "--max-num-proc", help="refused")
    options.add_argument("--host-discovery-script", help="refused")
    options.add_argument("command", nargs=argparse.REMAINDER, metavar="[python] SCRIPT [ARGUMENTS]")
    return options


def translated(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The equivalent arguments of `gossamer`, and the environment variables to set.

    Raises:
        SystemExit: for options that are not supported.
    """
    options = parser()
    given = options.parse_args(arguments)
    if not given.command:
        options.error("name the script: python -m gossamer.horovod -np 4 train.py")
    if given.mpi or given.jsrun:
        options.error(
            "there is no MPI. Leave out --mpi and --jsrun; `mpirun -np 4 python -m gossamer.horovod train.py` works"
        )
    if given.min_np or given.max_np or given.host_discovery_script:
        options.error(ELASTIC)
    slots = _slots(given.hosts, options)
    words = ["run", "--as-horovod"]
    if (workers := given.num_proc or slots) is not None:
        words += ["--workers", str(workers)]
    if given.recipe:
        words += ["--recipe", given.recipe]
    if given.network_interface:
        words += ["--interface", given.network_interface]
    variables = {
        "HOROVOD_TIMELINE": given.timeline_filename and str(Path(given.timeline_filename).absolute()),
        "HOROVOD_TIMELINE_MARK_CYCLES": "1" if given.timeline_mark_cycles else None,
        "HOROVOD_FUSION_THRESHOLD": None
        if given.fusion_threshold_mb is None
        else int(given.fusion_threshold_mb * 2**20),
        "HOROVOD_CYCLE_TIME": given.cycle_time_ms,
        "GOSSAMER_TIMEOUT": given.start_timeout,
    }
    return [*words, *given.command], {name: str(each) for name, each in variables.items() if each is not None}


def _slots(hosts: str | None, options: argparse.ArgumentParser) -> int | None:
    """How many workers `localhost:4` names."""
    if not hosts:
        return None
    host, _, slots = hosts.partition(":")
    if host not in ("localhost", "127.0.0.1") or "," in hosts:
        options.error(SEVERAL_HOSTS)
    return int(slots) if slots else None


def main() -> None:
    words, variables = translated(sys.argv[1:])
    os.environ.update(variables)
    from gossamer.comm.environment import here  # needs torch

    if here().world > 1:  # a launcher has started this process for one worker
        from gossamer.horovod.alias import install

        install()
        run_here(words[words.index("--as-horovod") + 1 :])
    else:
        os.execv(sys.executable, [sys.executable, "-m", "gossamer", *words])


def run_here(words: Sequence[str]) -> None:
    """Run the script in this process. words: options of `gossamer run`, then the script and its arguments."""
    left = list(words)
    while left and left[0] in ("--workers", "--recipe", "--interface"):
        if left[0] == "--recipe":
            os.environ["GOSSAMER_RECIPE"] = left[1]
        left = left[2:]
    if re.fullmatch(r"python[0-9.]*", Path(left[0]).name):
        left = left[2:] if left[1:2] == ["-u"] else left[1:]
    if left[0] == "-m":
        sys.argv = left[1:]
        runpy.run_module(left[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = left, str(Path(left[0]).resolve().parent)
        runpy.run_path(left[0], run_name="__main__")
