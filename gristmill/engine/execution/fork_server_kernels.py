"""Imported by the fork server of stages that run kernels: what runs them in numba is prepared once.

A kernel on arrays, as it is read from the cache, imports what numba wrote it by: 0.05 s in each worker.
"""

import numba.np.arrayobj
import numba.np.npyimpl  # noqa: F401
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

rtsys.initialize(cpu_target.target_context)  # what compiles kernels takes half a second more to import
