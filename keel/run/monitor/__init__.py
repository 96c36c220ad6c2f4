"""Callbacks, metric sinks and the Prometheus exporter of a run."""
