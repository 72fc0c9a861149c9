"""The types of timers and namespaces, and the decisions about them. Pure: no I/O, no clock, no randomness."""
