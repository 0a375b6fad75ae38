"""The browser of a run: pages of its clusters, removed documents and contaminated places, served on this machine."""
