"""Doctor names files with secrets that others may read, and the mode they should have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from duetime.cli.diagnosis import GOOD, NOTE, Finding
from duetime.cli.secret_files import check_secret_files
from duetime.config import load_config

URL = "postgresql://duetime:hunter2@db/x"


def findings(file: Path, **flags: Any) -> list[Finding]:
    config = load_config(environ={}, flags={name.replace("__", "."): value for name, value in flags.items()})
    return list(check_secret_files(str(file), config))


def written(path: Path, text: str, mode: int) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture(autouse=True)
def _no_url_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUETIME_STORE_URL", raising=False)


@pytest.mark.parametrize(
    ("mode", "who"), [(0o644, "its group and every user"), (0o640, "its group"), (0o604, "every user")]
)
def test_a_configuration_with_a_password_must_not_be_readable_by_others(tmp_path: Path, mode: int, who: str) -> None:
    file = written(tmp_path / "duetime.toml", f'[store]\nurl = "{URL}"\n', mode)
    (found,) = findings(file)
    assert found.verdict == NOTE
    assert found.says == f"{file} has the password of the store and can be read by {who}"
    assert f"chmod 600 {file}" in found.advice
    assert "hunter2" not in str(found)


def test_a_configuration_that_only_its_owner_reads_is_good(tmp_path: Path) -> None:
    (found,) = findings(written(tmp_path / "duetime.toml", f'[store]\nurl = "{URL}"\n', 0o600))
    assert found.verdict == GOOD


def test_a_configuration_without_secrets_may_be_readable(tmp_path: Path) -> None:
    assert findings(written(tmp_path / "duetime.toml", '[store]\nurl = "sqlite:///t.db"\n', 0o644)) == []
    assert findings(tmp_path / "none.toml") == []
    assert findings(written(tmp_path / "bad.toml", "[[[", 0o644)) == []


def test_a_secret_in_a_file_of_its_own_is_checked_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = written(tmp_path / "url", URL, 0o644)
    file = written(tmp_path / "duetime.toml", f'[store]\nurl = "file:{secret}"\n', 0o644)
    (found,) = findings(file)
    assert str(secret) in found.says
    monkeypatch.setenv("DUETIME_STORE_URL", f"file:{secret}")
    (found,) = findings(tmp_path / "none.toml")
    assert str(secret) in found.says


def test_the_key_of_the_server_is_a_secret(tmp_path: Path) -> None:
    key = written(tmp_path / "key.pem", "key", 0o640)
    (found,) = findings(tmp_path / "none.toml", server__tls_certificate="c.pem", server__tls_key=str(key))
    assert found.says == f"{key} has the key of the server's certificate and can be read by its group"
