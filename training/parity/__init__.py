"""The parity certificate: every layout against one process."""
