"""Exporters: listeners that bring a run's numbers to the tools people have, off the training thread.

destination     --log-to and attach(log_to=...): text such as tensorboard:DIR, and what it opens
export_queue    a bounded queue and a thread for each destination; what it cannot take is dropped and counted
points          events as points of curves: for tools that keep a history
totals          events as counters, gauges and a histogram: for tools that read the state now and then
whole_records   a file of records that are there whole or not at all, also on a full disk
crc32c          the checksum of TensorBoard's files
tensorboard     event files, without the library
json_lines      lines of JSON
prometheus      a page of text to be scraped, on loopback
http_post       a POST in bounded time, without the answer's content
otlp            OpenTelemetry's protocol over HTTP, as JSON
wandb_run       Weights & Biases, by its own library
mlflow_run      MLflow, by its own library
"""
