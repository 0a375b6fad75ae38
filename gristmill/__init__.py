"""The ground all packages stand on: configuration, command lines, errors, the engine, files. Never torch."""

__version__ = "0.1.0"
