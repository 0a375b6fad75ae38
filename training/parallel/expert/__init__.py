"""Expert parallelism: the experts of sparse layers are divided over data-parallel ranks."""
