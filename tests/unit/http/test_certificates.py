"""The end of a certificate, as openssl writes it."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from duetime.http.certificates import expires_at_ms


def openssl(*arguments: str) -> str:
    return subprocess.run(["openssl", *arguments], capture_output=True, check=True, text=True).stdout


@pytest.mark.parametrize("days", [1, 30, 3_650, 20_000])  # after 2049 the time has another form
def test_the_end_is_that_of_the_first_certificate(tmp_path: Path, days: int) -> None:
    for name, valid_days in (("first", days), ("second", 90)):
        made = ["-keyout", f"{tmp_path}/key.pem", "-out", f"{tmp_path}/{name}", "-days", str(valid_days)]
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", *made)
    end = openssl("x509", "-enddate", "-noout", "-in", f"{tmp_path}/first").strip().removeprefix("notAfter=")
    both = tmp_path / "both.pem"
    both.write_text((tmp_path / "first").read_text() + (tmp_path / "second").read_text())
    assert expires_at_ms(str(both)) == ssl.cert_time_to_seconds(end) * 1_000


@pytest.mark.parametrize("text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----"])
def test_what_is_no_certificate_has_no_end(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.pem").write_text(text)
    assert expires_at_ms(str(tmp_path / "c.pem")) is None
    assert expires_at_ms(str(tmp_path / "missing")) is None
