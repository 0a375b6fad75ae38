"""Which part of each global parameter a rank holds."""
