"""For all tests: the gate (scripts/gate), real servers (tests/servers.py), and a Ctrl-C for programs under test."""

import signal

import hypothesis

pytest_plugins = ["scripts.gate.record", "scripts.gate.seeds", "scripts.gate.time_limit", "servers"]

# A shell starts what it runs in the background (`make test &`) with SIGINT ignored, and programs inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # likewise `nohup make test`

# No test depends on how fast the machine is.
hypothesis.settings.register_profile("duetime", deadline=None)
hypothesis.settings.load_profile("duetime")
