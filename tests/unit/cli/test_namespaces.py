"""Commands about namespaces."""

from __future__ import annotations

import json

from command_line import HOOK, Run


def test_a_namespace_is_created_with_the_shards_of_a_size(at: Run) -> None:
    made = json.loads(at("namespace", "create", "invoices", "--size", "medium", "--json")[1])
    assert made["numShards"] == 256
    code, _, err = at("namespace", "create", "users", "--size", "medium", "--shards", "256")
    assert code == 2
    assert "not allowed with" in err
    assert at("namespace", "create", "users", "--size", "huge")[0] == 2


def test_namespaces_are_created_changed_and_their_secrets_rotated(at: Run) -> None:
    assert at("namespace", "create", "orders", "--shards", "4", "--to", HOOK)[0] == 0
    assert at("namespace", "create", "orders")[0] == 4
    assert at("namespace", "update", "orders", "--callback-timeout", "30", "--require-ok")[0] == 0
    found = json.loads(at("namespace", "get", "orders", "--json")[1])
    assert (found["numShards"], found["callbackTimeoutSeconds"], found["requireOk"]) == (4, 30, True)
    assert at("namespace", "update", "orders", "--max-retries", "2", "--retry-for", "1h")[0] == 0
    assert "up to 2, pauses from 1s up to 10m, for 1h" in at("namespace", "get", "orders")[1]
    first = json.loads(at("namespace", "rotate-secret", "orders", "--json")[1])
    second = json.loads(at("namespace", "rotate-secret", "orders", "--json")[1])
    assert (first["kept"], second["kept"]) == (0, 1)
    assert first["secret"] != second["secret"]
    assert len(json.loads(at("namespace", "get", "orders", "--json")[1])["signingSecrets"]) == 2
    _, out, _ = at("namespace", "list")
    assert "orders" in out
    assert "default" in out
    assert at("namespace", "delete", "orders")[:2] == (0, "deleted orders\n")
