"""Exporters: listeners that bring a run's numbers to the tools people have, off the training thread.

destination     --log-to and attach(log_to=...): text such as tensorboard:DIR, and a bounded queue and a thread for each
points          events as points of curves, and tools that keep a history: JSON lines, Weights & Biases, MLflow
tensorboard     event files
totals          events as counters, gauges and a histogram: for tools that read the state now and then
prometheus      a page of totals to be scraped, on loopback
otlp            OpenTelemetry's protocol over HTTP, as JSON
"""
