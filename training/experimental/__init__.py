"""Experimental kinds of parallelism, each behind the plug-in points of the core."""
