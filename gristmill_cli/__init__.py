"""The command line `gristmill`: all commands, the whole pipeline as one command, and the quick start."""
