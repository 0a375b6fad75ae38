"""The planner: step time and memory of a layout on a cluster, computed before a run; docs/planner.md has its error."""
