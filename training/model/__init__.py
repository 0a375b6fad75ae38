"""The decoder for a single device, its configuration, and its initial weights."""
