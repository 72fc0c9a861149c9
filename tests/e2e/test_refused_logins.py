"""A login that fails, is refused, is cancelled or runs out of time leaves no connection open, on any database."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, ClassVar

import asyncmy
import asyncpg
import cassandra.cluster
import mssql_python
import oracledb
import pytest
from open_sockets import breaks_off, cancelled_at, none_left
from real_server import until
from scripts.servers import Cassandra, MongoDb, MySqlLike, Postgres, Server
from tds_server import TdsServer, done, error

from duetime.errors import SetupError, StoreError, StoreUnavailable
from duetime.store import open_store
from duetime.stores.cassandra import address as cassandra_address
from duetime.stores.cassandra import connection as cassandra_connection
from duetime.stores.dynamodb import schema as dynamodb_schema
from duetime.stores.mongodb import schema as mongodb_schema
from duetime.stores.mysql import connection as mysql_connection
from duetime.stores.oracle import connection as oracle_connection
from duetime.stores.postgres import connection as postgres_connection
from duetime.stores.sqlserver import connection as sqlserver_connection
from servers import own, require

# Long enough to get somewhere, short enough for many. Whether a login gets that far decides no test.
WITHIN_SECONDS = 0.3
SECRET = "p%40ss%3Aw%2Frd"

Login = Callable[[str], Coroutine[Any, Any, None]]


async def to_postgres(url: str) -> None:
    connection = await postgres_connection.connect(postgres_connection.address_of(url), WITHIN_SECONDS)
    connection.terminate()


async def to_mysql(url: str) -> None:
    connection = await mysql_connection.connect(mysql_connection.address_of(url), WITHIN_SECONDS)
    mysql_connection._terminate(connection)


async def to_mongodb(url: str) -> None:
    milliseconds = int(WITHIN_SECONDS * 1_000)
    await open_store(f"{url}&connectTimeoutMS={milliseconds}&serverSelectionTimeoutMS={milliseconds}").open()


async def to_cassandra(url: str) -> None:
    link = await cassandra_connection.connect(
        cassandra_address.address_of(url), without_metadata=True, within_seconds=max(WITHIN_SECONDS, 1)
    )
    await link.close()


async def to_dynamodb(url: str) -> None:
    await open_store(url).open()


async def to_sqlserver(url: str) -> None:
    link = await sqlserver_connection.connect(sqlserver_connection.address_of(url), WITHIN_SECONDS)
    link.terminate()


async def to_oracle(url: str) -> None:
    link = await oracle_connection.connect(oracle_connection.address_of(url), WITHIN_SECONDS)
    link.terminate()


LOGINS: dict[str, Login] = {
    "postgres": to_postgres,
    "mariadb": to_mysql,
    "mysql": to_mysql,
    "mongodb": to_mongodb,
    "cassandra": to_cassandra,
    "ministack": to_dynamodb,
}
# How long a driver with threads, or with monitors, of its own may take to close.
THREADED_SECONDS = {"cassandra": 10.0, "mongodb": 5.0}


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamodb_schema, "_CALL_SECONDS", WITHIN_SECONDS)
    monkeypatch.setattr(mongodb_schema, "SETUP_SECONDS", 5 * WITHIN_SECONDS)


# --- servers that want a password ----------------------------------------------------------------


@contextlib.contextmanager
def guarded_postgres(certificates: Path) -> Iterator[Postgres]:
    with own("postgres18") as server:
        for name in ("server.key", "server.pem"):
            _give(server.data, server.data / name, (certificates / name).read_bytes())
        (server.data / "pg_hba.conf").write_text("host all guest all scram-sha-256\nhost all postgres all trust\n")
        server.query("ALTER SYSTEM SET ssl_cert_file = 'server.pem'")
        server.query("ALTER SYSTEM SET ssl_key_file = 'server.key'")
        server.query("ALTER SYSTEM SET ssl = on")
        server.query("CREATE ROLE guest LOGIN SUPERUSER PASSWORD 'p@ss:w/rd'")
        server.restart()
        yield server


@contextlib.contextmanager
def guarded_mysql(name: str, certificates: Path) -> Iterator[MySqlLike]:
    files = {"ssl_ca": "ca.pem", "ssl_cert": "server.pem", "ssl_key": "server.key"}
    with own(name, settings={setting: str(certificates / file) for setting, file in files.items()}) as server:
        assert isinstance(server, MySqlLike)
        server.query("CREATE USER guest@'127.0.0.1' IDENTIFIED BY 'p@ss:w/rd'")
        server.query("GRANT ALL ON *.* TO guest@'127.0.0.1'")
        yield server


@contextlib.contextmanager
def guarded_mongodb(certificates: Path) -> Iterator[MongoDb]:
    with own("mongodb") as server:
        assert isinstance(server, MongoDb)
        server.ask({"createUser": "guest", "pwd": "p@ss:w/rd", "roles": ["root"]})
        both = (certificates / "server.pem").read_bytes() + (certificates / "server.key").read_bytes()
        _give(server.data, server.folder / "both.pem", both)
        _give(server.data, server.folder / "ca.pem", (certificates / "ca.pem").read_bytes())
        _give(server.data, server.folder / "members.key", b"c2VjcmV0IG9mIHRoZSBtZW1iZXJz")
        server.settings |= {
            "security.authorization": "enabled",
            "security.keyFile": str(server.folder / "members.key"),
            "net.tls.mode": "preferTLS",
            "net.tls.certificateKeyFile": str(server.folder / "both.pem"),
            "net.tls.CAFile": str(server.folder / "ca.pem"),
            "net.tls.allowConnectionsWithoutCertificates": "true",
        }
        server.restart()
        yield server


@contextlib.contextmanager
def guarded_cassandra(certificates: Path) -> Iterator[Cassandra]:
    keys = certificates / "server.p12"
    tls = f"{{enabled: true, optional: true, keystore: {keys}, keystore_password: secret, store_type: PKCS12}}"
    settings = {"authenticator": "PasswordAuthenticator", "client_encryption_options": tls}
    with own("cassandra", settings=settings) as server:
        assert isinstance(server, Cassandra)
        server.execute("CREATE ROLE guest WITH PASSWORD = 'p@ss:w/rd' AND LOGIN = true AND SUPERUSER = true")
        yield server


def _give(owned: Path, file: Path, content: bytes) -> None:
    """A file that the server's user may read and nobody else."""
    file.write_bytes(content)
    file.chmod(0o600)
    owner = owned.stat()
    subprocess.run(["chown", f"{owner.st_uid}:{owner.st_gid}", str(file)], check=True)


def guarded_server(name: str, certificates: Path) -> contextlib.AbstractContextManager[Server]:
    """A server that speaks TLS and has the user `guest`. Ministack accepts any user, and speaks no TLS."""
    if name == "postgres":
        return guarded_postgres(certificates)
    if name in ("mariadb", "mysql"):
        return guarded_mysql(name, certificates)
    if name == "mongodb":
        return guarded_mongodb(certificates)
    if name == "cassandra":
        return guarded_cassandra(certificates)
    return contextlib.nullcontext(require(name))


# Of each database: how a URL asks for TLS without looking at the certificate, and for none.
_TLS = {
    "postgres": ("sslmode=require", "sslmode=disable"),
    "mariadb": ("ssl-mode=required", "ssl-mode=disabled"),
    "mysql": ("ssl-mode=required", "ssl-mode=disabled"),
    "mongodb": ("tls=true&tlsInsecure=true", "tls=false"),
    "cassandra": ("sslmode=require", "sslmode=disable"),
    "ministack": ("", ""),
}


def url_of(
    name: str, port: int, *, login: str = f"guest:{SECRET}", database: str = "", tls: bool = False, options: str = ""
) -> str:
    where = f"127.0.0.1:{port}"
    if name == "ministack":
        return f"dynamodb://{login}@us-east-1/{database or 'some'}?endpoint=http{'s' if tls else ''}://{where}"
    scheme = {"postgres": "postgresql", "mariadb": "mysql"}.get(name, name)
    database = database or {"postgres": "postgres", "mariadb": "test", "mysql": "test"}.get(name, "shop")
    more = {"mongodb": "&directConnection=true&authSource=admin"}.get(name, "")
    return f"{scheme}://{login}@{where}/{database}?{options or _TLS[name][0 if tls else 1]}{more}"


async def refused(login: Awaitable[Any]) -> None:
    with pytest.raises((SetupError, StoreError)):
        await login


# What a login may raise where no store is asked: anything else is a defect of ours.
OF_DRIVERS = (
    SetupError,
    StoreError,
    OSError,
    asyncpg.PostgresError,
    asyncmy.MySQLError,
    cassandra.DriverException,
    cassandra.cluster.NoHostAvailable,
    oracledb.Error,
    mssql_python.Error,
)


# --- logins to real servers ----------------------------------------------------------------------


class Logins:
    """The tests of one database. A class for each, so that they run in several processes at the same time."""

    NAME: ClassVar[str]

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, certificates: Path) -> Iterator[Server]:
        with guarded_server(cls.NAME, certificates) as server:
            yield server

    @property
    def closed_within_seconds(self) -> float:
        return THREADED_SECONDS.get(self.NAME, 0.0)

    @pytest.fixture(autouse=True)
    async def _started_driver(self, server: Server) -> None:
        """What a driver opens once for all connections must not count: threads, and the sockets that wake them."""
        if self.NAME == "cassandra":
            await LOGINS[self.NAME](self.url(server))

    def url(self, server: Server, **parts: Any) -> str:
        return url_of(self.NAME, server.port, **parts)

    @pytest.mark.parametrize("what", ["wrong password", "unknown user", "unknown database"])
    async def test_a_refused_login_is_closed(self, server: Server, what: str) -> None:
        await self.check_refused(server, what, tls=False)

    async def check_refused(self, server: Server, what: str, *, tls: bool) -> None:
        wrong = {
            "wrong password": {"login": "guest:wrong"},
            "unknown user": {"login": "nobody:wrong"},
            "unknown database": {"database": "nowhere"},
        }
        async with none_left(self.closed_within_seconds):
            await refused(open_store(self.url(server, tls=tls, **wrong[what])).open())

    @pytest.mark.parametrize("then", ["stalls", "hangs up"])
    async def test_a_login_that_is_broken_off_after_any_answer_is_closed(self, server: Server, then: Any) -> None:
        await self.check_broken_off(server, then, tls=False)

    async def check_broken_off(self, server: Server, then: Any, *, tls: bool) -> None:
        for answers in range(6):
            with breaks_off(then, server.port, answers) as port:
                async with none_left(self.closed_within_seconds):
                    try:
                        await LOGINS[self.NAME](url_of(self.NAME, port, tls=tls))
                    except OF_DRIVERS:
                        continue
            return  # these were all answers that a login needs

    async def test_a_login_that_is_cancelled_at_any_point_is_closed(self, server: Server) -> None:
        await self.check_cancelled(server, tls=False)

    async def check_cancelled(self, server: Server, *, tls: bool) -> None:
        for step in range(1, 200):
            async with none_left(self.closed_within_seconds):
                try:
                    was_cancelled = await cancelled_at(step, LOGINS[self.NAME](self.url(server, tls=tls)))
                except (StoreError, SetupError):
                    was_cancelled = False
            if not was_cancelled:
                break
        assert step > 1


class LoginsWithTls(Logins):
    """The same with TLS, and what can only happen with TLS."""

    UNTRUSTED: ClassVar[str]  # the part of a URL that names a certificate authority (CERTIFICATES/other.pem)

    @pytest.mark.parametrize("what", ["wrong password", "unknown user", "unknown database"])
    async def test_a_refused_login_with_tls_is_closed(self, server: Server, what: str) -> None:
        await self.check_refused(server, what, tls=True)

    @pytest.mark.parametrize("then", ["stalls", "hangs up"])
    async def test_a_login_with_tls_that_is_broken_off_after_any_answer_is_closed(
        self, server: Server, then: Any
    ) -> None:
        await self.check_broken_off(server, then, tls=True)

    async def test_a_login_with_tls_that_is_cancelled_at_any_point_is_closed(self, server: Server) -> None:
        await self.check_cancelled(server, tls=True)

    async def test_a_certificate_that_is_not_trusted_closes_the_connection(
        self, server: Server, certificates: Path
    ) -> None:
        options = self.UNTRUSTED.format(file=certificates / "other.pem")
        async with none_left(self.closed_within_seconds):
            await refused(open_store(self.url(server, options=options)).open())


class TestPostgres(LoginsWithTls):
    NAME = "postgres"
    UNTRUSTED = "sslmode=verify-full&sslrootcert={file}"


class TestMariaDb(LoginsWithTls):
    NAME = "mariadb"
    UNTRUSTED = "ssl-mode=verify_ca&ssl-ca={file}"


class TestMySql(LoginsWithTls):
    NAME = "mysql"
    UNTRUSTED = "ssl-mode=verify_ca&ssl-ca={file}"


class TestMongoDb(LoginsWithTls):
    NAME = "mongodb"
    UNTRUSTED = "tls=true&tlsCAFile={file}"


class TestCassandra(LoginsWithTls):
    NAME = "cassandra"
    UNTRUSTED = "sslmode=verify-full&sslrootcert={file}"


class TestMinistack(Logins):
    NAME = "ministack"


class TestServersWithoutTls:
    @pytest.mark.parametrize("name", ["postgres18", "mariadb", "mongodb", "cassandra", "ministack"])
    async def test_asking_for_tls_closes_the_connection(self, name: str) -> None:
        server = require(name)
        name = name.removesuffix("18")
        login = {"postgres": "postgres", "mariadb": "root"}.get(name, "test:test")
        if name == "cassandra":
            await LOGINS[name](url_of(name, server.port))  # starts the threads of the driver
        async with none_left(THREADED_SECONDS.get(name, 0.0)):
            await refused(open_store(url_of(name, server.port, login=login, tls=True)).open())


# --- databases of which there is no server here --------------------------------------------------

# The first answer of an Oracle listener: "accept" (a login that goes on), "resend" (say that again), "refuse".
_RESEND = b"\x00\x08\x00\x00\x0b\x00\x00\x00"
_REFUSE = b"\x00\x20\x00\x00\x04\x00\x00\x00\x22\x00\x00\x14(ERR=12514)        "


@pytest.mark.parametrize("then", ["stalls", "hangs up"])
@pytest.mark.parametrize("answer", [b"", _RESEND, _REFUSE], ids=["nothing", "resend", "refuse"])
@pytest.mark.parametrize("protocol", ["tcp", "tcps"])
async def test_a_login_to_oracle_that_is_broken_off_is_closed(then: Any, answer: bytes, protocol: str) -> None:
    with breaks_off(then, says=answer) as port:
        async with none_left():
            with pytest.raises(OF_DRIVERS):
                await to_oracle(f"oracle://me:secret@127.0.0.1:{port}/test?protocol={protocol}")


@pytest.mark.parametrize("protocol", ["tcp", "tcps"])
async def test_a_login_to_oracle_that_is_cancelled_is_closed(protocol: str) -> None:
    with breaks_off("stalls", says=_RESEND) as port:
        for step in range(1, 6):
            async with none_left():
                with contextlib.suppress(*OF_DRIVERS):
                    await cancelled_at(step, to_oracle(f"oracle://me:secret@127.0.0.1:{port}/test?protocol={protocol}"))


# Its driver works in threads, and counts in whole seconds.
SQLSERVER_SECONDS = 10.0


@pytest.mark.parametrize(
    ("then", "encrypt"),
    [("stalls", "no"), ("stalls", "yes"), ("hangs up", "no"), ("hangs up", "yes"), ("hangs up", "strict")],
)
async def test_a_login_to_sql_server_that_is_broken_off_is_closed(then: Any, encrypt: str) -> None:
    with breaks_off(then) as port:
        async with none_left(SQLSERVER_SECONDS):
            with pytest.raises(OF_DRIVERS):
                await to_sqlserver(f"sqlserver://me:secret@127.0.0.1:{port}/test?encrypt={encrypt}")


async def test_a_strict_login_to_sql_server_that_stalls_is_counted_until_its_server_is_gone() -> None:
    """With encrypt=strict the driver keeps no limit while TLS is agreed on, and its thread cannot be stopped."""
    abandoned = sqlserver_connection.AbandonedThreads(1)
    async with none_left(SQLSERVER_SECONDS):
        with breaks_off("stalls") as port:
            address = sqlserver_connection.address_of(f"sqlserver://me:secret@127.0.0.1:{port}/test?encrypt=strict")
            with pytest.raises(TimeoutError):
                await sqlserver_connection.connect(address, WITHIN_SECONDS, abandoned=abandoned)
            with pytest.raises(StoreUnavailable, match="1 threads are blocked"):
                await sqlserver_connection.connect(address, WITHIN_SECONDS, abandoned=abandoned)

    async def is_forgotten() -> bool:
        with contextlib.suppress(StoreUnavailable):
            abandoned.check()
            return True
        return False

    await until(is_forgotten, "the thread that waited has ended")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (18456, "Login failed for user 'me'."),
        (4060, 'Cannot open database "test" requested by the login. The login failed.'),
    ],
)
async def test_a_refused_login_to_sql_server_is_closed(number: int, text: str) -> None:
    """The stand-in is in this process, and closes its end when ours is closed."""
    with TdsServer(lambda said: None, login=error(number, text, 14) + done(0x02)) as server:
        async with none_left(SQLSERVER_SECONDS):
            with pytest.raises(OF_DRIVERS):
                await to_sqlserver(server.url())


@pytest.mark.parametrize("answers", [(), (done(),)], ids=["its settings", "its history"])
async def test_a_session_of_sql_server_that_cannot_be_set_up_is_closed(answers: tuple[bytes, ...]) -> None:
    left = list(answers)
    with TdsServer(lambda said: left.pop(0) if left else None) as server:
        async with none_left(SQLSERVER_SECONDS):
            with pytest.raises(OF_DRIVERS):
                await to_sqlserver(server.url())


async def test_tls_that_sql_server_does_not_have_closes_the_connection() -> None:
    with TdsServer(lambda said: None) as server:
        async with none_left(SQLSERVER_SECONDS):
            with pytest.raises(OF_DRIVERS):
                await to_sqlserver(server.url().replace("encrypt=no", "encrypt=yes"))


async def test_a_login_to_sql_server_that_is_cancelled_is_closed() -> None:
    with breaks_off("stalls") as port:
        async with none_left(SQLSERVER_SECONDS):
            assert await cancelled_at(1, to_sqlserver(f"sqlserver://me:secret@127.0.0.1:{port}/test"))
