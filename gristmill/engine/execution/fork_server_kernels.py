"""Imported by the fork server of stages that run kernels: numba is prepared once, and not in each worker."""

import numba

numba.core.registry.cpu_target.target_context.refresh()  # half a second, before its first kernel
