"""Commands and tables about single documents of a run: duplicates side by side, what rules removed, and their ways."""
