"""Placements: experts on the ranks that they are divided over, and on the replicas of these."""

from training.sharding.placement import Placement

# Of an expert-parallel layout's experts, in place of data parallelism's rows: each rank along "ep" has some of the
# experts, whose gradient has terms on the ranks that have the same ones, over which ZeRO shards them
EXPERT_PARALLEL = Placement(
    shard={"ep": 0, "expert_shard": 0},
    replicated=("expert_replicate",),
    gradient_sum=("expert_replicate", "expert_shard"),
)
