"""Observing a run: event listeners that write live progress, the record at the end, and plots of records.

event_log          the events of one rank as lines of JSON, appended during training: its numbers, and live lines
flight_dump        the latest operations of one rank as a file, and of all ranks in torchfrtrace's format
aside_log          data outside the record: vitals, links, activity, notices, warnings, errors, changes of the group
vitals             resource usage of a process and its machine, from the system's counters
rank_record        the numbers of one rank, summed from its event log
live               reads the live lines of this machine's ranks
terminal           shows a run: worker lines, progress, closing table
control_sequences  removes terminal control sequences from the output of workers
reporter           progress, record and exporters of a session without a launcher
record             the run's record, merged from those of its ranks
saved_record       gossamer.Record: a record of a file, as a table and as a pandas frame
comparison         records compared: speed, loss at equal time and steps, cost
plot               records as a picture (matplotlib)
panels             contents of pictures and pages of records: curves, and bars of a step
stacks             Python stacks of all ranks, equal ones merged
target             ends a run when a metric reaches a target or a time is over

telemetry/         the run's store: numbers of all ranks and machines, in one SQLite file
watch/             the live page of a run
exporters/         metrics for TensorBoard, W&B, MLflow, Prometheus and OTLP
pages/             static pages: their charts, their style, and the comparison of records
trace/             spans of all ranks, merged into one timeline
"""
