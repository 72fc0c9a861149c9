"""Adapters that deliver timers. delivery.py is their port."""
