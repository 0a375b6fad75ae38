"""Replicas that take local steps, and the outer optimizer that averages them. Read replicas.py first."""
