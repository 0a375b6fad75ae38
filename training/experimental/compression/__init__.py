"""Gradient compression: replicas send less than their gradients, and remember what they left out (error feedback)."""
