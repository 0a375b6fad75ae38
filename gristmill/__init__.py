"""Base package that all others import: command lines, configuration, errors, engine, file formats; never torch."""

__version__ = "0.1.0"
