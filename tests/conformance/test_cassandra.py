"""Cassandra passes the conformance suite."""

from __future__ import annotations

from on_server import OnServer


class TestCassandra(OnServer):
    SERVER = "cassandra"
