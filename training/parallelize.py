"""How a model is spread over the processes: read this first.

The model knows nothing of it. Whatever splits the model comes before what replicates it.
"""

from torch import nn

from training.data_parallel import apply_data_parallel
from training.mesh import World


def parallelize(model: nn.Module, world: World) -> nn.Module:
    """The model as this process runs it: replicated over the mesh's "dp", last, around whatever it then is."""
    return apply_data_parallel(model, world)
