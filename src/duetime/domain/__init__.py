"""The vocabulary of timers and the decisions about them. Pure: no I/O, no clock, no randomness."""
