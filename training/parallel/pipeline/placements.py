"""Placements: the embedding that is also the output matrix, on two pipeline stages."""

from training.sharding.placement import Placement

# Of an embedding that is also the output matrix, where these are two pipeline stages (Narayanan et al. 2021, section
# 3.2): "tied" are the ranks of the first and the last stage
TIED = Placement(replicated=("tied",), gradient_sum=("tied",))
