"""Models that score documents: what their files say, and how they are run and trained."""
