"""What is going on in the output folder of a stage or a run."""
