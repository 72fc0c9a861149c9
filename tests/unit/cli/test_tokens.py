"""`duetime token new`."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from command_line import Run

from duetime.config import load_config


def test_a_new_token_is_printed_with_the_configuration_that_accepts_it(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("token", "new", "--name", "shop", "--namespace", "orders", "--verb", "read")
    assert code == 0
    token = next(line.strip() for line in out.splitlines() if line.startswith("  dt_"))
    file = tmp_path / "duetime.toml"
    file.write_text("[auth]\n" + out[out.index("[[auth.tokens]]") :])
    (accepted,) = load_config(file, environ={}).auth.tokens
    assert accepted.sha256 == sha256(token.encode()).hexdigest()
    assert (accepted.name, accepted.namespaces, accepted.verbs) == ("shop", ("orders",), ("read",))
    assert token not in file.read_text()
