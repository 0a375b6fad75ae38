"""What a task reads of others: which files earlier stages left in a bucket, and copies of objects to work on."""
