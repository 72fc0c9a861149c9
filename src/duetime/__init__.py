"""Duetime: a durable timer service."""

__version__ = "0.1.0"
