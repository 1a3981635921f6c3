"""What the machines of a job are and how fast they reach each other, before anything is trained on them."""

from gossamer.doctor.report import Host, Pair, Report, read_report, write_report
from gossamer.doctor.verdict import VERSIONS, differing, rate_text, round_trip_text, verdict

__all__ = [
    "VERSIONS",
    "Host",
    "Pair",
    "Report",
    "differing",
    "rate_text",
    "read_report",
    "round_trip_text",
    "verdict",
    "write_report",
]
