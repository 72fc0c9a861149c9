"""A cluster in one process, in virtual time, from a seed."""
