"""How fast compressors are on one core, beside what memory allows."""

from gossamer.bench.cases import KERNELS, Variants, fed_back, roster
from gossamer.bench.report import ABOUT, ABOUT_PAIRS, cells, pair_cells, remarks
from gossamer.bench.suite import BenchmarkResult, build, measure
from gossamer.bench.two_process import Paired, measure_pair
from gossamer.environment.host_info import machine

__all__ = [
    "ABOUT",
    "ABOUT_PAIRS",
    "KERNELS",
    "BenchmarkResult",
    "Paired",
    "Variants",
    "build",
    "cells",
    "fed_back",
    "machine",
    "measure",
    "measure_pair",
    "pair_cells",
    "remarks",
    "roster",
]
