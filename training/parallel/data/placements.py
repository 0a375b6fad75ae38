"""Placements: the rows of each parameter that a replica's rank updates."""

from training.sharding.placement import Placement

# Of every parameter: ZeRO's rows along "shard". With ZeRO-0 that axis has one rank; ZeRO-1 and 2 gather the rows for
# the forward pass once a step, and ZeRO-3 whenever they are used
DATA_PARALLEL = Placement(shard={"shard": 0}, replicated=("replicate",), gradient_sum=("replicate", "shard"))
