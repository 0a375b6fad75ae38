"""Published models by name: their options, their counts of parameters and their sources."""
