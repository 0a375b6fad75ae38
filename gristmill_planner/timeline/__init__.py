"""Pipeline timelines: simulated from the order of passes, and drawn."""
