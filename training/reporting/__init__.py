"""Reporting: metrics, throughput, evaluation, text samples, the summary and loss curves of a run."""
