"""The parity certificate: compares every parallel layout with one process."""
