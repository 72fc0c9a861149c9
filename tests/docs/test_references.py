"""What the documents name exists: files, tests, settings, metrics, commands, routes, error codes, make targets."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from documents import PATHS, ROOT, Block, Mention, blocks, check_each, inline_code, links, name_of, shell_commands

from duetime import client as client_module
from duetime.api import dispatch as api_app
from duetime.api.routes import PREFIX, ROUTES
from duetime.cli.arguments import build_parser
from duetime.client import AsyncClient
from duetime.config import load_config
from duetime.errors import DuetimeError
from duetime.telemetry import Telemetry

PACKAGE = ROOT / "src" / "duetime"
SETTINGS = tomllib.loads((PACKAGE / "config.default.toml").read_text("utf-8"))
CODE = inline_code()


def matching(pattern: str) -> list[Mention]:
    """Inline code that is, whole, of this form."""
    found = [mention for mention in CODE if re.fullmatch(pattern, mention.text)]
    assert found, f"no document mentions anything like {pattern}: has the pattern gone stale?"
    return found


def source_files(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        yield from folder.rglob("*.py")


# --- files and links -----------------------------------------------------------------------------


def test_every_link_leads_to_a_file() -> None:
    def check(mention: Mention) -> None:
        target, _, anchor = mention.text.partition("#")
        if target.startswith("https://"):
            return
        assert not anchor, "no anchors: headings change"
        assert ((ROOT / mention.document).parent / target).exists(), "no such file"

    check_each(links(), check)


def test_every_named_file_exists() -> None:
    """From the root, from the package, or by its bare name; or a program that a document shows, with its name in
    its first line. Files of the reader's own are listed here."""
    shown = {block.text.splitlines()[0].removeprefix("# ") for block in blocks("python")}

    def check(mention: Mention) -> None:
        if mention.text in shown:
            return
        if mention.text in ("duetime.toml", "client.py", "uv.lock"):
            return
        assert (ROOT / mention.text).is_file() or (PACKAGE / mention.text).is_file(), "no such file"

    check_each(matching(r"\w[\w./-]*\.(py|toml|sql|txt|json|lock|md|yml)"), check)


def test_every_named_folder_exists() -> None:
    def check(mention: Mention) -> None:
        assert (ROOT / mention.text).exists(), "no such folder"

    check_each(matching(r"(src|tests|benchmarks|docs|spec)/[\w./-]*"), check)


def test_every_named_module_exists() -> None:
    def check(mention: Mention) -> None:
        if mention.text == "duetime.db":
            return
        path = PACKAGE.joinpath(*mention.text.split(".")[1:])
        assert path.is_dir() or path.with_suffix(".py").is_file(), "no such module"

    check_each(matching(r"duetime(\.\w+)+"), check)


def test_every_document_is_reachable_from_the_readme() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    targets = links()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        waiting += [
            (path.parent / mention.text).resolve()
            for mention in targets
            if mention.document == name_of(path) and mention.text.endswith(".md") and "://" not in mention.text
        ]
    assert {name_of(path) for path in PATHS} - {name_of(path) for path in seen} <= {"CHANGELOG.md"}


def test_no_document_names_a_path_or_package_index_of_our_machines() -> None:
    def check(path: Path) -> None:
        found = re.search(r"/work/|/root/|/tmp/|--index-url|--find-links|pypi", path.read_text("utf-8"))
        assert not found, found

    check_each([*PATHS, ROOT / "requirements.lock", ROOT / "requirements-dev.lock", ROOT / "Makefile"], check)


# --- tests ---------------------------------------------------------------------------------------


def known_tests() -> set[str]:
    return {
        name
        for path in source_files(ROOT / "tests", PACKAGE / "testing")
        for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))
    }


def test_every_named_test_exists() -> None:
    known = known_tests()

    def check(mention: Mention) -> None:
        assert mention.text in known, "no such test"

    check_each(matching(r"test_\w+"), check)


# --- settings and metrics ------------------------------------------------------------------------


def test_every_named_setting_exists() -> None:
    def check(mention: Mention) -> None:
        section, _, key = mention.text.partition(".")
        assert key in SETTINGS[section] or key in ("py", "toml"), "no such setting"

    check_each(matching(rf"({'|'.join(SETTINGS)})\.[a-z_]+"), check)


def test_every_named_environment_variable_exists() -> None:
    variables = {f"DUETIME_{section}_{key}".upper() for section, keys in SETTINGS.items() for key in keys}
    of_clients = {"DUETIME_URL", "DUETIME_TOKEN", "DUETIME_CONFIG"}
    of_kubernetes = {"DUETIME_SERVICE_HOST", "DUETIME_PORT"}  # named because they are ignored
    known = variables | of_clients | of_kubernetes | {"DUETIME_SECTION_KEY"}

    def check(mention: Mention) -> None:
        assert mention.text in known, "no such environment variable"

    check_each(matching(r"DUETIME_[A-Z_]+"), check)


def test_every_example_of_a_configuration_is_valid(tmp_path: Path) -> None:
    def check(block: Block) -> None:
        file = tmp_path / "duetime.toml"
        file.write_text(block.text)
        load_config(file, environ={})

    check_each(blocks("toml"), check)


def test_every_named_metric_exists() -> None:
    known = {metric.name for metric in vars(Telemetry()).values()}

    def check(mention: Mention) -> None:
        assert mention.text in known, "no such metric"

    check_each(matching(r"duetime_[a-z_]+"), check)


# --- commands ------------------------------------------------------------------------------------


def parsed(words: list[str]) -> str | None:
    """The error of the command-line parser, or None if it accepts the command."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            build_parser().parse_args(words)
    except SystemExit as end:
        return None if end.code == 0 else said.getvalue()
    return None


def duetime_commands() -> list[Mention]:
    found = []
    for mention in shell_commands():
        words = shlex.split(mention.text, comments=True)
        if words[0] == "uvx":
            words = words[1:]
        if words[0] == "duetime":
            found.append(Mention(mention.document, shlex.join(words[1:])))
    assert len(found) > 20
    return found


def test_every_example_of_a_command_is_accepted_by_the_parser() -> None:
    def check(command: Mention) -> None:
        refusal = parsed(shlex.split(command.text))
        assert refusal is None, refusal or "the parser refuses it"

    check_each(duetime_commands(), check)


def test_every_command_named_in_a_sentence_exists() -> None:
    """Its options may be left out there: then only its name is checked."""

    def check(mention: Mention) -> None:
        words = shlex.split(mention.text.removeprefix("uvx "))[1:]
        name = [word for word in words if re.fullmatch(r"[a-z-]+", word) and not word.startswith("-")][:2]
        given = parsed(words)
        assert given is None or parsed([*name, "--help"]) is None, given or "the parser refuses it"

    check_each(matching(r"(uvx )?duetime [a-z].*"), check)


def test_the_reference_lists_every_command() -> None:
    described = set(re.findall(r"^\| `duetime ([a-z -]+)` \|", (ROOT / "docs/reference/cli.md").read_text(), re.M))
    assert described == set(all_commands())


def all_commands() -> Iterator[str]:
    for name, parser in subcommands(build_parser()):
        inner = list(subcommands(parser))
        yield from [f"{name} {sub}" for sub, _ in inner] or [name]


def subcommands(parser: object) -> Iterator[tuple[str, object]]:
    for action in getattr(parser, "_actions", ()):
        if isinstance(action.choices, dict):
            yield from action.choices.items()


def test_the_exit_codes_are_those_of_the_help() -> None:
    listed = dict(re.findall(r"^\| (\d+) \| (.*) \|$", (ROOT / "docs/reference/cli.md").read_text(), re.M))
    helped = dict(re.findall(r"^  (\d+)  (.*)$", build_parser().format_help(), re.M))
    assert listed == helped


def test_every_named_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()

    def check(mention: Mention) -> None:
        target = mention.text.removeprefix("make ")
        assert re.search(rf"^{target}:.*##", makefile, re.M), "no such target, or it has no description"

    check_each(matching(r"make [a-z-]+"), check)


# --- the API -------------------------------------------------------------------------------------


def curl_requests() -> list[Mention]:
    found = [mention for mention in shell_commands() if mention.text.startswith("curl ")]
    assert found
    return found


def test_every_example_of_a_request_is_valid() -> None:
    def check(mention: Mention) -> None:
        words = shlex.split(mention.text)
        url = next((word for word in words if word.startswith("http")), "")
        route = next((route for route in ROUTES if url.endswith(PREFIX + route.path)), None)
        assert route is not None, "no such route"
        assert "--json" in words or "content-type:application/json" in words, "no content type"
        msgspec.json.decode(words[-1], type=route.request)

    check_each(curl_requests(), check)


def test_the_reference_lists_every_route() -> None:
    text = (ROOT / "docs/reference/http-api.md").read_text()
    assert set(re.findall(r"`((?:timers|namespaces|flows|schedules|cluster)/\w+)`", text)) == {
        route.path for route in ROUTES
    }


def test_the_reference_lists_every_error_code_with_its_status() -> None:
    text = (ROOT / "docs/reference/http-api.md").read_text()
    listed = {code: int(status) for code, status in re.findall(r"^\| `([a-z_]+)` \| (\d{3}) \|", text, re.M)}
    assert listed == codes_of_the_server()


# Never answered: classes that stand for a family, and errors that end the process or stay in the engine.
SILENT = {"rejected", "not_found", "conflict", "setup", "member_dead", "schema_mismatch"}


def codes_of_the_server() -> dict[str, int]:
    """Every code an answer can carry, with its status: of a class, or given where one is raised."""
    assert api_app  # imported: it has errors of its own
    kinds = {kind.__name__: kind for kind in errors_below(DuetimeError) if not of_the_callers(kind)}
    codes = {kind.code: kind.status for kind in kinds.values()}
    for path in source_files(PACKAGE):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
                for given in node.keywords:
                    if given.arg == "code" and isinstance(given.value, ast.Constant):
                        codes[str(given.value.value)] = kinds[node.func.id].status
    return {code: status for code, status in codes.items() if code not in SILENT | {"malformed_answer"}}


def of_the_callers(kind: type[DuetimeError]) -> bool:
    """The client and the command line have errors of their own, which no server answers."""
    return kind.__module__.startswith(("duetime.client", "duetime.cli"))


def errors_below(kind: type[DuetimeError]) -> Iterator[type[DuetimeError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from errors_below(child)


# --- the client ----------------------------------------------------------------------------------


def test_the_reference_lists_every_method_of_the_client() -> None:
    text = (ROOT / "docs/reference/python.md").read_text()
    methods = [name for name in vars(AsyncClient) if not name.startswith("_")]
    assert [name for name in methods if not re.search(rf"`{name}\(", text)] == []


def test_every_class_named_in_the_reference_of_the_client_is_public() -> None:
    def check(mention: Mention) -> None:
        assert mention.text in client_module.__all__, "not in duetime.client.__all__"

    classes = [m for m in matching(r"[A-Z][a-z]+[A-Za-z]*") if m.document == "docs/reference/python.md"]
    check_each(classes, check)


# --- symbols of the code -------------------------------------------------------------------------

GUIDES = ("CONTRIBUTING.md", "docs/ARCHITECTURE.md")
NAMES_THAT_MODULES_DO_NOT_HAVE = {"utils", "common", "helpers", "manager", "base"}
SYMBOL = r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\([^`]*\))?`"
LIST = rf"(?:{SYMBOL}(?:, | and | or ))*{SYMBOL}"
FILE = r"`([\w./-]+\.(?:py|toml)|(?:src|tests|benchmarks|scripts|docs)/[\w./-]+)`"


def named_beside_a_file(text: str) -> Iterator[tuple[str, str]]:
    """Of "`a`, `b` and `c` in `file.py`" and "`a` (`file.py`)" each symbol, with the file."""
    for match in re.finditer(rf"({LIST}),? (?:in |of |\(){FILE}", text):
        for symbol in re.findall(SYMBOL, match[1]):
            yield symbol, match[match.lastindex or 0]


def source_of(file: str) -> str:
    [found] = [path for path in (ROOT / file, PACKAGE / file) if path.exists()]
    files = [found] if found.is_file() else sorted(found.rglob("*.py"))
    return "\n".join(path.read_text("utf-8") for path in files)


def test_every_symbol_that_a_guide_names_beside_a_file_is_in_that_file() -> None:
    named = [
        (guide, symbol, file)
        for guide in GUIDES
        for line in (ROOT / guide).read_text("utf-8").splitlines()
        for symbol, file in named_beside_a_file(line)
    ]

    def check(mention: tuple[str, str, str]) -> None:
        _, symbol, file = mention
        source = source_of(file)
        for part in symbol.split("."):
            assert re.search(rf"\b{part}\b", source), f"{part} is not in {file}"

    assert len(named) > 10
    check_each(named, check)


def test_every_symbol_that_a_guide_names_is_somewhere_in_the_source() -> None:
    source = "\n".join(source_of(folder) for folder in ("src", "tests", "benchmarks", "scripts"))
    source += (ROOT / "pyproject.toml").read_text("utf-8") + (ROOT / "Makefile").read_text("utf-8")
    symbols = [
        Mention(guide, symbol)
        for guide in GUIDES
        for symbol in re.findall(SYMBOL, (ROOT / guide).read_text("utf-8"))
        if symbol not in NAMES_THAT_MODULES_DO_NOT_HAVE
    ]

    def check(mention: Mention) -> None:
        for part in mention.text.split("."):
            assert re.search(rf"\b{part}\b", source), f"{part} is nowhere in the source"

    check_each(symbols, check)
