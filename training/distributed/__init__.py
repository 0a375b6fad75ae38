"""Ranks: process groups, collectives, signals, hang detection, a pool of workers."""
