"""Migrations of a database package, and the checks of its schema version."""

from __future__ import annotations

import pytest

from duetime.errors import SchemaMismatch
from duetime.stores.migrations import Migrations

THREE = Migrations(["one", "two", "three"])


@pytest.mark.parametrize("package", ["mysql", "oracle", "postgres", "sqlite", "sqlserver"])
def test_the_files_of_a_package_are_its_migrations(package: str) -> None:
    migrations = Migrations.of_package(f"duetime.stores.{package}")
    assert migrations.version == len(migrations.texts) >= 1
    assert "timers" in migrations.texts[0]


@pytest.mark.parametrize(
    ("found", "missing"),
    [(0, [(1, "one"), (2, "two"), (3, "three")]), (2, [(3, "three")]), (3, [])],
)
def test_a_schema_needs_the_migrations_after_its_version(found: int, missing: list[tuple[int, str]]) -> None:
    assert list(THREE.missing(found)) == missing


def test_a_schema_of_a_newer_version_is_refused() -> None:
    assert THREE.check_not_newer("host/db", 3) == 3
    with pytest.raises(
        SchemaMismatch, match="host/db has schema 4, this version knows 3: it was used by a newer Duetime"
    ):
        THREE.check_not_newer("host/db", 4)


def test_a_schema_that_lacks_migrations_is_refused() -> None:
    THREE.check_complete("host/db", 3)
    with pytest.raises(SchemaMismatch, match="host/db has schema 2, this version needs 3; `duetime serve`"):
        THREE.check_complete("host/db", 2)
    with pytest.raises(SchemaMismatch, match="host/db has no tables yet; `duetime serve`"):
        THREE.check_complete("host/db", 0)


def test_the_fact_for_a_diagnosis_has_both_versions() -> None:
    assert THREE.fact(2) == "schema version 2, this Duetime knows 3"
    assert THREE.fact(0) == "schema version none yet, this Duetime knows 3"
