"""The decoder for a single device: its configuration, modules and initial weights."""
