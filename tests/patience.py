"""Patience: how long a test waits for other processes before it fails, on a machine that may have other work."""

import os


def patience(seconds: float) -> float:
    """`seconds` of an idle machine, as many times longer as there are processes for each core, and twice at least.

    Only a process that hangs is waited for so long: a limit that is too high costs nothing else.
    """
    processes = os.getloadavg()[0]
    return seconds * (2 + processes / (os.cpu_count() or 1))
