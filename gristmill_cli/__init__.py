"""The front door: the command `gristmill`, the whole pipeline as one command, and the funnel."""
