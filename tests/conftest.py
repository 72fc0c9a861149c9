"""For all tests: real servers (tests/servers.py), and a Ctrl-C that programs under test can be sent."""

import signal

pytest_plugins = ["servers"]

# A shell starts what it runs in the background (`make test &`) with SIGINT ignored, and programs inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
