"""The conformance suite on Ministack, an emulator of DynamoDB. On the real service, or on DynamoDB local, by URL:

DUETIME_TEST_STORE=dynamodb://eu-central-1/duetime-test pytest --pyargs duetime.testing.conformance
"""

from __future__ import annotations

from on_server import OnServer


class TestDynamoDB(OnServer):
    SERVER = "ministack"
    HISTORIES = 10  # the emulator is slow
