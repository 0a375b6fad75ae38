"""Ranks: the layout, process groups, device mesh, collectives, hang detection, a pool of workers."""
