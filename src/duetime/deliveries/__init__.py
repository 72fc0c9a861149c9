"""Deliverers: one file for each way to deliver. delivery.py is their port."""
