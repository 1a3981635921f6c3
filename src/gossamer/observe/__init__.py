"""Observing a run: event listeners that write live progress, the record at the end, and pictures of records.

recorder           listens to one rank's events: logs them, writes live lines
event_log          one rank's numbers as lines of JSON, appended while training goes on
activity           what a rank is at: an operation, whom it waits for, saving
flight_dump        one rank's latest operations as a file, and all ranks' as torchfrtrace reads them
aside_log          what belongs into no record: vitals, links, notices, warnings, errors, changes of the group
link_watch         what this worker's connections carried, from the kernel's counters
vitals             what a process and its machine use and lack, from the system's counters
rank_record        one rank's numbers, added up from its event log
live               reads the live lines of this machine's ranks
terminal           shows a run: worker lines, progress, closing table
control_sequences  what workers print, without what would steer the terminal
reporter           progress and record of rank 0's session, where no launcher makes them
status_line        one line of progress on standard error
record             the run's record, merged from those of its ranks
comparison         records side by side: speed, loss at equal time and steps, money
plot, page         a comparison as a picture (matplotlib), and as one HTML file
panels             what both show: curves, their names' places, bars of a step
svg                the page's pictures, without a library
stacks             Python stacks of all ranks side by side, equal ones merged
target             ends a run once a metric is good enough or time is up

telemetry/         the run's store: numbers of all ranks and machines, in one SQLite file
watch/             the page that shows a run while it trains
exporters/         numbers for TensorBoard, W&B, MLflow, Prometheus and OTLP
trace/             spans of all ranks, merged into one timeline
"""
