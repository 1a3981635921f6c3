"""Observing a run: event listeners that write live progress, the record at the end, and pictures of records.

recorder           listens to one rank's events: logs them, writes live lines
event_log          one rank's numbers as lines of JSON, appended while training goes on
flight_dump        one rank's latest operations as a file, and all ranks' as torchfrtrace reads them
aside_log          what belongs into no record: vitals, links, activity, notices, warnings, errors, changes of the group
vitals             what a process and its machine use and lack, from the system's counters
rank_record        one rank's numbers, added up from its event log
live               reads the live lines of this machine's ranks
terminal           shows a run: worker lines, progress, closing table
control_sequences  what workers print, without what would steer the terminal
reporter           progress, record and exporters of this process's session, where no launcher makes them
record             the run's record, merged from those of its ranks
comparison         records side by side: speed, loss at equal time and steps, money
plot               records as a picture (matplotlib)
panels             what pictures and pages of records show: curves, and bars of a step
stacks             Python stacks of all ranks side by side, equal ones merged
target             ends a run once a metric is good enough or time is up

telemetry/         the run's store: numbers of all ranks and machines, in one SQLite file
watch/             the page that shows a run while it trains
exporters/         numbers for TensorBoard, W&B, MLflow, Prometheus and OTLP
pages/             pages that are files: their charts, their style, and the comparison of records
trace/             spans of all ranks, merged into one timeline
"""
