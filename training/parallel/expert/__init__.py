"""Experts of sparse layers on several ranks: what their routers sum over them."""
