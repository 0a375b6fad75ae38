"""What to remove: of each cluster, which document is kept, and which duplicates are confirmed."""
