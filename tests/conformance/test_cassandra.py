"""Cassandra passes the conformance suite."""

from __future__ import annotations

from on_server import OnServer


class TestCassandra(OnServer):
    SERVER = "cassandra"
    HISTORIES = 12  # a write takes four round trips
