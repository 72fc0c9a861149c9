"""The schema of a SQLite file: migrations, and connections to a file whose schema is of this version."""

from __future__ import annotations

import contextlib
import os

import apsw

from duetime.errors import SchemaMismatch
from duetime.stores.migrations import Migrations
from duetime.stores.sqlite.connection import open_file
from duetime.stores.sqlite.errors import setup_errors
from duetime.stores.store_url import store_url_error

__all__ = ["SCHEMA_VERSION", "connect", "migrate"]

APPLICATION_ID = 0x44756554  # "DueT" in the header of the file: distinguishes our files from those of other programs
_MIGRATIONS = Migrations.of_package("duetime.stores.sqlite")
SCHEMA_VERSION = _MIGRATIONS.version


def migrate(path: str) -> None:
    """Creates the tables, or updates them to this version. Each migration is a transaction."""
    with setup_errors(path):
        _make_private(path)
        db = open_file(path, apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
        try:
            found = _schema_version(path, db)
            _use_wal(path, db)
            for number, sql in _MIGRATIONS.missing(found):
                db.execute("BEGIN IMMEDIATE")
                try:
                    db.execute(sql)
                    db.execute(f"PRAGMA application_id={APPLICATION_ID}")
                    db.execute(f"PRAGMA user_version={number}")
                    db.execute("COMMIT")
                finally:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
        finally:
            db.close()


def connect(path: str, *pragmas: str) -> apsw.Connection:
    """Opens a connection to a file whose schema is of this version."""
    if not os.path.exists(path):
        raise SchemaMismatch(f"{path} does not exist; `duetime serve` creates it")
    with setup_errors(path):
        db = open_file(path, apsw.SQLITE_OPEN_READWRITE)
        try:
            _MIGRATIONS.check_complete(path, _schema_version(path, db))
            _use_wal(path, db)
            for pragma in pragmas:
                db.execute(f"PRAGMA {pragma}").fetchall()
            # A damaged root page is reported at the start, and not by the first request.
            for table in ("timers", "members", "namespaces"):
                db.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchall()  # noqa: S608 - names from the line above
        except BaseException:
            db.close()
            raise
        return db


def _make_private(path: str) -> None:
    """Creates the file so that only its owner can read it: it contains signing secrets. SQLite gives its log the same
    mode."""
    with contextlib.suppress(OSError):  # it exists already, or cannot be created: then SQLite reports why
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _schema_version(path: str, db: apsw.Connection) -> int:
    """The schema version of the file, 0 for an empty one."""
    application_id, version = db.pragma("application_id"), db.pragma("user_version")
    if application_id != APPLICATION_ID:
        if application_id or version or db.execute("SELECT count(*) FROM sqlite_schema").get:
            raise store_url_error(f"{path} is a SQLite database of another program; name another file")
        return 0
    return _MIGRATIONS.check_not_newer(path, int(version))


def _use_wal(path: str, db: apsw.Connection) -> None:
    if db.pragma("journal_mode", "wal") != "wal":
        raise store_url_error(f"{path}: this file system does not support a SQLite write-ahead log")
