"""Pipeline parallelism: ranks hold different layers, and micro-batches pass through them."""
