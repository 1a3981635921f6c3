"""Exporters: listeners that send a run's metrics to other tools, off the training thread.

destination     --log-to and attach(log_to=...): text such as tensorboard:DIR, and a bounded queue and a thread for each
points          events as points of curves, and tools with a history: JSON lines, Weights & Biases, MLflow
tensorboard     event files
totals          events as counters, gauges and a histogram: for tools that poll the current state
prometheus      a page of totals to be scraped, on loopback
otlp            OpenTelemetry's protocol over HTTP, as JSON
"""
