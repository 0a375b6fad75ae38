"""Imported by the fork server of stages that run kernels: what runs them in numba is prepared once."""

from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

rtsys.initialize(cpu_target.target_context)  # what compiles kernels takes half a second more to import
