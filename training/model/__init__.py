"""The decoder for a single device: its configuration and modules."""
