"""Data parallelism: replicas of the model read different sequences; ZeRO shards what they hold."""
