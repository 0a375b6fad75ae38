"""Sharding: the shard of each global parameter that a rank has."""
