"""The command `gristmill`: its subcommands, the whole pipeline as one command, and the quick start."""
