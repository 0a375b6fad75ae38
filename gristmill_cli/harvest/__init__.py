"""A corpus gathered from this machine."""
