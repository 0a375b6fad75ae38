"""Text from a trained decoder: a key-value cache, sampling, and the loop that extends texts token by token."""
