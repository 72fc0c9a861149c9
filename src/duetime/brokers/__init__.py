"""Connections to message brokers, and the formats of commands and events."""
