"""Parts of `gristmill estimate`: the samples that it measures, and costs as a table and in sentences."""
