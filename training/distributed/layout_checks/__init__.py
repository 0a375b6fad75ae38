"""Checks that a model and the other options of a run fit a layout: one file for each kind of parallelism."""
