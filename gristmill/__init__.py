"""Ground layer under all other packages: command lines, configuration, errors, engine, file formats. No torch."""

__version__ = "0.1.0"
