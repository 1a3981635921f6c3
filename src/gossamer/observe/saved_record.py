"""Record: a saved record of a run, for notebooks: fields by name, a table of its numbers, and a pandas frame."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gossamer.base import bounded_file
from gossamer.base.html_table import html_table
from gossamer.errors import StoreError
from gossamer.observe.event_log import LOG_SUFFIX
from gossamer.observe.record import MOST_RECORD_BYTES, has_newer_logs, recover
from gossamer.observe.terminal import rows

NAME_A_RUN = "Name a run's folder, such as runs/2026-01-31_12-00-00, or the file of attach(..., record=FILE)."
NO_RUN = "{path} has neither a record.json nor an event log of a session that trained. " + NAME_A_RUN
ALWAYS_THERE = ("recipe", "steps", "metrics")  # fields of a record
NO_PANDAS = "A data frame needs pandas, and pandas is not installed. Write: pip install pandas"


class Record(dict[str, Any]):
    """The record of a run, a dict of its fields. A notebook shows it as a table.

    Example:
        >>> record = gossamer.Record(metrics={"loss": [[1, 0.5, 3.25], [2, 1.0, 3.0]]})
        >>> record["metrics"]["loss"][-1]  # step, seconds, value
        [2, 1.0, 3.0]
    """

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """Read the record of a run.

        If all processes of the run were killed, the record is made from its event logs. In a folder of several runs it
        is that of the last one.

        Args:
            path: the run's folder, its record, or an event log (FILE.events.jsonl).

        Returns:
            The record.

        Raises:
            StoreError: there is no record, or the file is not one.
        """
        path = Path(path)
        kept = record_file(path)
        is_current = kept.exists() and not path.name.endswith(LOG_SUFFIX) and not has_newer_logs(path, kept)
        found = recover(path) if path.exists() and not is_current else None
        if found is not None:
            return cls(found)
        if not kept.exists() or path.name.endswith(LOG_SUFFIX):
            raise StoreError(NO_RUN.format(path=path))
        try:
            record = cls(json.loads(bounded_file.read_text(kept, MOST_RECORD_BYTES)))
        except OSError as problem:
            raise StoreError(f"{kept} cannot be read: {problem.strerror}. {NAME_A_RUN}") from None
        except RecursionError:  # read_json would search a record of months for brackets
            raise StoreError(f"{kept} is not a record: it nests too deeply.") from None
        except (ValueError, TypeError) as problem:
            why = "it is not JSON" if isinstance(problem, json.JSONDecodeError) else str(problem)
            raise StoreError(f"{kept} is not a record: {why}.") from None
        if missing := [name for name in ALWAYS_THERE if name not in record]:
            raise StoreError(f"{kept} is not a record: it has no {missing[0]}. {NAME_A_RUN}")
        return record

    def to_frame(self) -> Any:
        """The logged metrics as a pandas DataFrame: a row per step, with `seconds` and a column per metric.

        `seconds` count from the start of training. A metric that was not logged at a step is NaN there.

        Raises:
            ImportError: pandas is not installed.
        """
        if find_spec("pandas") is None:
            raise ImportError(NO_PANDAS)
        import pandas

        table: dict[int, dict[str, float | None]] = {}
        for name, points in self["metrics"].items():
            for step, seconds, value in points:
                table.setdefault(step, {"seconds": seconds})[name] = value
        steps = sorted(table)
        index = pandas.Index(steps, name="step")
        return pandas.DataFrame([table[step] for step in steps], index=index, columns=["seconds", *self["metrics"]])

    def _repr_html_(self) -> str | None:
        try:
            return html_table(list(rows(self, {})))
        except KeyError:  # a record of `gossamer study`, or of another program: shown as a dict
            return None


def record_file(path: Path) -> Path:
    """File of the run's record, whether it exists or not."""
    if path.is_dir():
        return path / "record.json"
    name = path.name
    return path.with_name(name.removesuffix(LOG_SUFFIX) + ".json") if name.endswith(LOG_SUFFIX) else path
