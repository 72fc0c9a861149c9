"""The conformance suite on Ministack, an imitation of DynamoDB. On the real one, or on Amazon's own local one, by URL:

DUETIME_TEST_STORE=dynamodb://eu-central-1/duetime-test pytest --pyargs duetime.testing.conformance
"""

from __future__ import annotations

from on_server import OnServer


class TestDynamoDB(OnServer):
    SERVER = "ministack"
