"""Benchmarks of EleutherAI's lm-evaluation-harness (lm_eval), run on what was trained."""
