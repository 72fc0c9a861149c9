"""For all tests: real servers (tests/servers.py)."""

pytest_plugins = ["servers"]
