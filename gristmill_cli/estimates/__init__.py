"""What `gristmill estimate` is made of: the samples that it measures, and costs as a table and in sentences."""
