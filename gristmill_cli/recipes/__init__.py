"""Recipes: complete runs, a folder each, with one TOML for the data, one for the training, and what to expect."""
