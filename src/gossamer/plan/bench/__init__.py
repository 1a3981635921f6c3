"""Compressor benchmarks: GB/s of encoding and decoding on one core, compared with copying memory.

cases          compressors with their parameters
workloads      rows of the table: compressors and yardsticks (copy, add, matrix products)
replay         one worker's part of an aggregation, with recorded answers
interleave     fair timing: all timers take turns in every round
suite          all rows in one interleaved run, with rates and shares of torch.add's rate
two_process    one process alone, then two at once, each a `worker`
report         tables and remarks for `gossamer bench`
"""

from gossamer.comm.environment.host_info import machine
from gossamer.plan.bench.cases import KERNELS, Variants, case_texts, with_feedback
from gossamer.plan.bench.report import ABOUT, ABOUT_PAIRS, cells, pair_cells, remarks
from gossamer.plan.bench.suite import BenchmarkResult, build, run_benchmarks
from gossamer.plan.bench.two_process import PairResult, run_pair_benchmark

__all__ = [
    "ABOUT",
    "ABOUT_PAIRS",
    "KERNELS",
    "BenchmarkResult",
    "PairResult",
    "Variants",
    "build",
    "case_texts",
    "cells",
    "machine",
    "pair_cells",
    "remarks",
    "run_benchmarks",
    "run_pair_benchmark",
    "with_feedback",
]
