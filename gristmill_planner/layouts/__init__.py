"""Layouts that a plan considers: those that the trainer accepts, and the least memory of each."""
