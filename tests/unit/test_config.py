"""Configuration: who wins, what is refused and by which name, where secrets come from and that they stay hidden."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from duetime.config import SECTIONS, Config, Token, load_config, shown
from duetime.errors import SetupError

SHA256 = "0123456789abcdef" * 4
TOKEN = {"name": "shop", "sha256": SHA256, "namespaces": ["orders"], "verbs": ["read"]}


def loaded(toml: str = "", tmp_path: Path | None = None, environ: dict[str, str] | None = None, **flags: Any) -> Config:
    file = None
    if tmp_path is not None:
        file = tmp_path / "duetime.toml"
        file.write_text(toml, "utf-8")
    return load_config(file, environ=environ or {}, flags={path.replace("__", "."): v for path, v in flags.items()})


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(SetupError) as caught:
        loaded(*args, **kwargs)
    return str(caught.value)


class TestPrecedence:
    def test_the_defaults_alone_are_a_configuration(self) -> None:
        config = loaded()
        assert config.server.listen == "127.0.0.1:8463"
        assert config.engine.lease.ms == 3_000
        assert config.engine.lease.seconds == 3.0

    def test_a_file_wins_over_the_defaults_and_leaves_the_rest(self, tmp_path: Path) -> None:
        config = loaded('[store]\nurl = "memory://"\n', tmp_path)
        assert config.store.url == "memory://"
        assert config.log.level == "info"

    def test_the_environment_wins_over_the_file(self, tmp_path: Path) -> None:
        config = loaded('[log]\nlevel = "error"\nformat = "json"', tmp_path, {"DUETIME_LOG_LEVEL": "debug"})
        assert (config.log.level, config.log.format) == ("debug", "json")

    def test_flags_win_over_the_environment(self, tmp_path: Path) -> None:
        config = loaded('[log]\nlevel = "error"', tmp_path, {"DUETIME_LOG_LEVEL": "debug"}, log__level="warning")
        assert config.log.level == "warning"

    def test_the_environment_gives_every_type(self) -> None:
        config = loaded(
            environ={
                "DUETIME_SERVER_CONNECTIONS_MAX": "7",
                "DUETIME_NAMESPACES_CREATE_ON_FIRST_USE": "true",
                "DUETIME_ENGINE_LOOK_AHEAD": "2m",
                "DUETIME_DELIVERY_ALLOW_NETWORKS": '["10.0.0.0/8"]',
                "DUETIME_AUTH_TOKENS": f'[{{"name":"shop","sha256":"{SHA256}"}}]',
            }
        )
        assert config.server.connections_max == 7
        assert config.namespaces.create_on_first_use is True
        assert config.engine.look_ahead.ms == 120_000
        assert config.delivery.allow_networks == ("10.0.0.0/8",)
        assert config.auth.tokens == (Token(name="shop", sha256=SHA256),)

    def test_variables_of_the_clients_and_of_others_are_not_settings(self) -> None:
        others = {"DUETIME_URL": "x", "DUETIME_TOKEN": "x", "DUETIME_CONFIG": "x", "PATH": "x", "duetime_x": "x"}
        assert loaded(environ=others) == loaded()


class TestUnknownKeys:
    def test_in_a_file_are_named_with_the_file_and_the_section(self, tmp_path: Path) -> None:
        message = refusal("[store]\nurll = 1", tmp_path)
        assert str(tmp_path / "duetime.toml") in message
        assert "unknown key store.urll; the keys are url" in message

    def test_sections_are_named(self, tmp_path: Path) -> None:
        assert "unknown section [stoer]" in refusal("[stoer]\nurl = 1", tmp_path)
        assert "unknown section [url]" in refusal('url = "memory://"', tmp_path)

    def test_a_section_that_is_a_value_is_an_error(self, tmp_path: Path) -> None:
        assert "store must be a section, written [store]" in refusal('store = "memory://"', tmp_path)

    def test_in_flags_are_named(self) -> None:
        assert "unknown key store.urll" in refusal(store__urll="x")
        assert "unknown section [stoer]" in refusal(stoer__url="x")
        assert "unknown key store." in refusal(store="memory://")

    @pytest.mark.parametrize(
        ("old", "new"),
        [("concurrency_per_destination", "concurrency_per_flow"), ("rate_per_destination", "rate_per_flow")],
    )
    def test_that_were_renamed_are_refused_with_the_new_name(self, old: str, new: str, tmp_path: Path) -> None:
        assert f"delivery.{old} is now named delivery.{new}" in refusal(f"[delivery]\n{old} = 5", tmp_path)
        assert f"flags: delivery.{old} is now named delivery.{new}" in refusal(**{f"delivery__{old}": 5})
        with pytest.raises(
            SetupError, match=f"DUETIME_DELIVERY_{old.upper()} is now named DUETIME_DELIVERY_{new.upper()}"
        ):
            load_config(environ={f"DUETIME_DELIVERY_{old.upper()}": "5"})

    def test_in_a_token_are_named(self, tmp_path: Path) -> None:
        message = refusal(f'[[auth.tokens]]\nname = "a"\nsha256 = "{SHA256}"\nverb = ["read"]', tmp_path)
        assert "auth.tokens[0]" in message
        assert "`verb`" in message


def warnings(environ: dict[str, str]) -> tuple[str, ...]:
    return loaded(environ=environ).warnings


class TestUnknownVariables:
    def test_a_misspelt_one_is_a_warning_that_names_the_setting_it_resembles(self) -> None:
        config = loaded(environ={"DUETIME_STROE_URL": "postgresql://me:hush@db/x", "DUETIME_LOG_LEVEL": "debug"})
        assert config.warnings == (
            "unknown environment variable DUETIME_STROE_URL is ignored: did you mean DUETIME_STORE_URL?",
        )
        assert (config.store.url, config.log.level) == (loaded().store.url, "debug")

    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("DUETIME_STORE_URLL", "DUETIME_STORE_URL"),
            ("DUETIME_STORE", "DUETIME_STORE_URL"),
            ("DUETIME_LISTEN", "DUETIME_SERVER_LISTEN"),
            ("DUETIME_AUTH_TOKEN", "DUETIME_AUTH_TOKENS"),
            ("DUETIME_TOKE", "DUETIME_TOKEN"),
        ],
    )
    def test_the_nearest_setting_is_suggested(self, name: str, meant: str) -> None:
        assert f"did you mean {meant}?" in warnings({name: "x"})[0]

    def test_one_that_resembles_nothing_is_a_warning_without_a_suggestion(self) -> None:
        assert warnings({"DUETIME_QQQ": "x"}) == (
            "unknown environment variable DUETIME_QQQ is ignored: `duetime config show --env` lists all variables",
        )

    def test_each_has_a_warning(self) -> None:
        assert len(warnings({"DUETIME_QQQ": "x", "DUETIME_LOG_LEVLE": "debug"})) == 2

    def test_settings_and_variables_of_clients_and_of_others_have_none(self) -> None:
        assert warnings({"DUETIME_URL": "x", "DUETIME_TOKEN": "x", "PATH": "x", "DUETIME_LOG_LEVEL": "error"}) == ()

    @pytest.mark.parametrize("service", ["DUETIME", "DUETIME_API", "DUETIME_SERVER", "DUETIME_STORE_2"])
    @pytest.mark.parametrize(("address", "host"), [("10.0.0.11", "10.0.0.11"), ("fd00::b", "[fd00::b]")])
    def test_what_kubernetes_sets_for_services_is_ignored(self, service: str, address: str, host: str) -> None:
        of_service = {
            "SERVICE_HOST": address,
            "SERVICE_PORT": "8463",
            "SERVICE_PORT_HTTP": "8463",
            "SERVICE_PORT_GRPC_WEB2": "50051",
            "PORT": f"tcp://{host}:8463",
            "PORT_8463_TCP": f"tcp://{host}:8463",
            "PORT_8463_TCP_PROTO": "tcp",
            "PORT_8463_TCP_PORT": "8463",
            "PORT_8463_TCP_ADDR": address,
            "PORT_53_UDP": f"udp://{host}:53",
            "PORT_53_UDP_PROTO": "udp",
            "PORT_53_UDP_PORT": "53",
            "PORT_53_UDP_ADDR": address,
        }
        assert warnings({f"{service}_{name}": value for name, value in of_service.items()}) == ()

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("DUETIME_PORT", "8463"),  # a mistake: it does not set the port
            ("DUETIME_SERVER_PORT", "8463"),
            ("DUETIME_SERVICE_HOST", "duetime.example"),
            ("DUETIME_SERVICE_PORT", "http"),
            ("DUETIME_PORTS", "tcp://10.0.0.11:8463"),
            ("DUETIME_PORT_8463", "tcp://10.0.0.11:8463"),
            ("DUETIME_PORT_8463_TCP_TIMEOUT", "5"),
            ("DUETIMEX_SERVICE_HOST_", "10.0.0.11"),
        ],
    )
    def test_a_variable_that_only_looks_like_one_of_kubernetes_is_a_warning(self, name: str, value: str) -> None:
        assert len(warnings({name: value})) == name.startswith("DUETIME_")


class TestWrongValues:
    @pytest.mark.parametrize(
        ("path", "value", "says"),
        [
            ("server.listen", 8463, "Expected `str`, got `int`"),
            ("server.connections_max", "many", "Expected `int`, got `str`"),
            ("server.connections_max", True, "Expected `int`, got `bool`"),
            ("server.connections_max", 1.5, "Expected `int`, got `float`"),
            ("namespaces.create_on_first_use", 1, "Expected `bool`, got `int`"),
            ("engine.look_ahead", 60, "must be a duration in quotes"),
            ("engine.look_ahead", "60", "must be a duration such as"),
            ("engine.look_ahead", "101000d", "at most 100 years"),
            ("delivery.allow_networks", "10.0.0.0/8", "Expected `array`, got `str`"),
        ],
    )
    def test_a_wrong_type_is_named_by_its_path(self, path: str, value: Any, says: str) -> None:
        message = refusal(**{path: value})
        assert path in message
        assert says in message

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            ("server.request_bytes_max", 0),
            ("server.connections_max", -1),
            ("server.idle_timeout", "0s"),
            ("namespaces.default_num_shards", 0),
            ("namespaces.default_num_shards", 16_385),
            ("engine.heartbeat_interval", "0s"),
            ("engine.lease", "1s"),  # two heartbeats exactly
            ("engine.dead_after", "3s"),  # the lease exactly
            ("engine.look_ahead", "0s"),
            ("engine.timers_in_memory_max", 999),
            ("engine.writes_waiting_max", 0),
            ("engine.write_timeout", "0s"),
            ("delivery.concurrency_per_flow", 0),
            ("delivery.concurrency_max", 0),
            ("delivery.rate_per_flow", -1),
            ("delivery.connect_timeout", "0s"),
            ("delivery.breaker_failures", 0),
            ("delivery.breaker_pause", "0s"),
            ("delivery.breaker_pause_max", "999ms"),
            ("limits.payload_bytes_max", 0),
            ("limits.json_depth_max", 0),
            ("limits.batch_timers_max", 0),
            ("limits.page_timers_max", 0),
            ("limits.page_bytes_max", 0),
            ("nats.url", "nats://user:secret@localhost:4222"),
            ("nats.ack_wait", "999ms"),
            ("nats.duplicate_window", "99ms"),
            ("nats.password", "secret"),  # without a user
            ("nats.tls_certificate", "cert.pem"),  # without a key
            ("nats.in_flight_max", 0),
            ("kafka.sasl_mechanism", "GSSAPI"),
            ("kafka.user", "duetime"),  # without a mechanism
            ("kafka.password", "secret"),  # without a user
            ("kafka.tls_certificate", "cert.pem"),
            ("log.level", "loud"),
            ("log.format", "xml"),
        ],
    )
    def test_a_value_that_cannot_work_is_named_by_its_path(self, path: str, value: Any) -> None:
        assert path in refusal(**{path: value})

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"sha256": "***"}, "shop: sha256 must be 64 hex digits"),
            ({"sha256": "x" * 64}, "shop: sha256 must be 64 hex digits"),
            ({"sha256": SHA256 + "\n"}, "shop: sha256 must be 64 hex digits"),
            ({"verbs": ["read", "fly"]}, "shop: unknown verbs fly"),
        ],
    )
    def test_a_token_that_cannot_work_is_named(self, change: dict[str, Any], says: str) -> None:
        assert says in refusal(auth__tokens=[TOKEN | change])

    def test_a_variable_of_the_wrong_type_is_named(self) -> None:
        message = refusal(environ={"DUETIME_SERVER_CONNECTIONS_MAX": "many"})
        assert "DUETIME_SERVER_CONNECTIONS_MAX must be int, got 'many'" in message
        assert "CREATE_ON_FIRST_USE must be bool" in refusal(
            environ={"DUETIME_NAMESPACES_CREATE_ON_FIRST_USE": "\udcff"}
        )

    def test_a_file_that_cannot_be_read_is_named(self, tmp_path: Path) -> None:
        for file in (tmp_path / "absent.toml", tmp_path):
            with pytest.raises(SetupError, match=str(file)):
                load_config(file, environ={})

    def test_a_file_that_is_not_toml_is_named_with_the_place(self, tmp_path: Path) -> None:
        message = refusal("[store\n", tmp_path)
        assert "duetime.toml" in message
        assert "line 1" in message


class TestSecretsFromElsewhere:
    def test_a_file(self, tmp_path: Path) -> None:
        secret = tmp_path / "url"
        secret.write_text("postgresql://u:p@h/db\n")
        assert loaded(store__url=f"file:{secret}").store.url == "postgresql://u:p@h/db"

    def test_a_variable(self) -> None:
        config = loaded(environ={"STORE": "postgresql://u:p@h/db", "DUETIME_STORE_URL": "env:STORE"})
        assert config.store.url == "postgresql://u:p@h/db"

    def test_inside_of_lists_and_tables(self) -> None:
        config = loaded(environ={"HASH": SHA256}, auth__tokens=[TOKEN | {"sha256": "env:HASH"}])
        assert config.auth.tokens[0].sha256 == SHA256

    def test_what_is_not_there_is_named(self, tmp_path: Path) -> None:
        assert f"file:{tmp_path}/none" in refusal(store__url=f"file:{tmp_path}/none")
        assert "env:NOT_SET" in refusal(store__url="env:NOT_SET")

    def test_a_file_that_is_not_text_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "binary").write_bytes(b"\xff\xfe")
        assert f"file:{tmp_path}/binary" in refusal(store__url=f"file:{tmp_path}/binary")


class TestShown:
    @pytest.mark.parametrize(
        ("url", "redacted"),
        [
            ("postgresql://u:hunter2@db:5432/x", "postgresql://u:***@db:5432/x"),
            ("postgresql://u:hun/ter@2@db/x", "postgresql://u:***@db/x"),
            ("postgresql://:hunter2@db/x", "postgresql://:***@db/x"),
            ("mysql://db/x?user=u&password=hunter2&tls=on", "mysql://db/x?user=u&password=***&tls=on"),
            ("dynamodb://eu/t?aws_secret_access_key=hunter2", "dynamodb://eu/t?aws_secret_access_key=***"),
        ],
    )
    def test_passwords_in_store_urls_are_hidden(self, url: str, redacted: str) -> None:
        text = shown(loaded(store__url=url))
        assert "hunter2" not in text
        assert tomllib.loads(text)["store"]["url"] == redacted

    @pytest.mark.parametrize(
        "url",
        ["sqlite:////data/a@b:c.db", "postgresql://u@db:5432/x", "memory://", "cassandra://a,b/k?keyspace=z"],
    )
    def test_a_url_without_a_password_is_shown_as_it_is(self, url: str) -> None:
        assert tomllib.loads(shown(loaded(store__url=url)))["store"]["url"] == url

    def test_token_hashes_are_hidden_and_the_rest_of_the_token_is_not(self) -> None:
        text = shown(loaded(auth__tokens=[TOKEN]))
        assert SHA256 not in text
        assert tomllib.loads(text)["auth"]["tokens"] == [TOKEN | {"sha256": "***"}]

    @pytest.mark.parametrize("path", ["nats.password", "nats.token", "kafka.password"])
    def test_passwords_of_brokers_are_hidden(self, path: str) -> None:
        section, _, key = path.partition(".")
        user = {} if key == "token" else {f"{section}.user": "duetime"}
        mechanism = {"kafka.sasl_mechanism": "PLAIN"} if section == "kafka" else {}
        text = shown(load_config(environ={}, flags={path: "hunter2", **user, **mechanism}))
        assert "hunter2" not in text
        assert tomllib.loads(text)[section][key] == "***"

    def test_a_shown_configuration_with_redacted_hashes_cannot_start_a_server(self, tmp_path: Path) -> None:
        assert "sha256 must be 64 hex digits" in refusal(shown(loaded(auth__tokens=[TOKEN])), tmp_path)

    def test_what_is_shown_loads_to_the_same_configuration(self, tmp_path: Path) -> None:
        changed = loaded(
            store__url="sqlite:////data/a b.db",
            engine__look_ahead="1500ms",
            server__drain_timeout="0s",
            delivery__allow_networks=["10.0.0.0/8", "fd00::/8"],
            delivery__allow_http=False,
            delivery__user_agent='odd "\\\t\x7f ü',
            log__format="json",
        )
        assert changed != loaded()
        assert loaded(shown(changed), tmp_path) == changed
        assert loaded(shown(loaded()), tmp_path) == loaded()


class TestReference:
    def test_the_default_file_has_every_key_and_no_other(self) -> None:
        text = files("duetime").joinpath("config.default.toml").read_text("utf-8")
        in_file = {section: set(keys) for section, keys in tomllib.loads(text).items()}
        config = loaded()
        in_code = {name: set(getattr(config, name).__struct_fields__) for name in SECTIONS}
        assert in_file == in_code

    def test_every_key_of_a_token_is_explained(self) -> None:
        text = files("duetime").joinpath("config.default.toml").read_text("utf-8")
        for key in Token.__struct_fields__:
            assert f"# {key} = " in text

    def test_no_two_settings_share_a_variable(self) -> None:
        config = loaded()
        names = [f"{s}_{k}" for s in SECTIONS for k in getattr(config, s).__struct_fields__]
        assert len(names) == len(set(names))
