"""What the machines of a job are and how fast they reach each other, before anything is trained on them."""

from gossamer.doctor.report import DoctorReport, HostReport, PairReport, read_report, write_report
from gossamer.doctor.verdict import VERSIONS, differing, rate_text, round_trip_text, verdict

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
