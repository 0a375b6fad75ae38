"""Asynchronous training: workers compute gradients of parts of batches, and a server updates the weights."""
