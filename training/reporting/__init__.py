"""What a run reports: metrics, evaluation, samples, plots."""
