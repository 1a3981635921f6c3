"""Doctor: describes a job's machines and measures the links between them, before training.

worker           the script of every rank: describes its host, then measures every pair of ranks in turn
ping_link        the TCP connection between a pair for measurements
link_statistics  round trip, bandwidth and clock offset from raw timings
report           the results as JSON
verdict          the one-line summary
"""

from gossamer.plan.doctor.report import DoctorReport, HostReport, PairReport, read_report, write_report
from gossamer.plan.doctor.verdict import VERSIONS, differing, rate_text, round_trip_text, verdict

__all__ = [
    "VERSIONS",
    "DoctorReport",
    "HostReport",
    "PairReport",
    "differing",
    "rate_text",
    "read_report",
    "round_trip_text",
    "verdict",
    "write_report",
]
