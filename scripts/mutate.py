"""Mutation testing: does a test notice when one line of a module is wrong?

Every mutant is the module with one small change (scripts/mutations.py): a statement deleted, a condition negated or
made constant, `<` turned into `<=`, a number changed by one, an `AND` dropped from SQL. Each is run against the tests
that execute the changed line, the fastest first, and if they all pass, against seeds of the simulator. A mutant that
fails nothing has survived: either a test is missing, or the change is harmless and scripts/mutate_survivors.toml says
why.

    python -m scripts.mutate engine/shard engine/flow   two modules of src/duetime, with the tests of the table below
    python -m scripts.mutate stores/memory --lines 40-80
    python -m scripts.mutate engine/shard --list          only list the mutants
    python -m scripts.mutate shard --tests tests/unit/engine/test_engine.py
    make mutate MODULES="engine/shard engine/flow"

Prints every survivor that is not in scripts/mutate_survivors.toml, as a diff, and a summary. The exit code is 1 if
there is one. To accept a survivor, copy what is printed below it into scripts/mutate_survivors.toml and add the reason.
Nothing in the source tree is changed: a mutant exists only in the memory of its own process. Tests that start other
processes do not see it.
"""

from __future__ import annotations

import argparse
import builtins
import gc
import importlib.util
import logging
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NoReturn

import hypothesis
import msgspec
import pytest
from msgspec import Struct

from scripts.mutations import Mutant, mutants_of, with_notes

__all__ = ["Judgement", "main"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "duetime"
SURVIVORS = Path(__file__).with_name("mutate_survivors.toml")


def _unit(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/{folder}/test_{name}.py" for name in names)


_ENGINE = (
    *_unit("engine", "shard", "fire_loop", "look_ahead", "group_commit", "ownership", "namespaces"),
    *_unit("engine", "unexpected_errors", "cases_engine", "flow", "engine_lifecycle", "engine"),
    *_unit("cluster", "membership"),
    *_unit("service", "commands", "forwarded", "forwarding", "namespace_operations", "service", "status"),
    *_unit("api", "dispatch", "encode", "routes"),
    "tests/unit/test_telemetry.py",
    *(f"tests/sim/test_{name}.py" for name in ("cases_cluster", "failover", "refused_forwards")),
)
_STORES = (
    *_unit(
        "stores",
        "fencing",
        "merging",
        "sessions",
        "sql_store",
        "store_url",
        "migrations",
        "oracle_sql",
        "sqlserver_sql",
    ),
    *_unit("stores", "sqlite_store", "sqlite_sql", "sqlite_errors", "sqlite_file"),
    "tests/conformance/test_stores.py",
    "tests/sim/test_failover.py",
)
_PEERS = (
    *_unit("cluster", "forwarding", "peer_client", "peer_protocol"),
    "tests/unit/api/test_peer_server.py",
    *_ENGINE,
)
# Which tests could notice a mutant of a module. Only tests that run the module in their own process are of use. A file
# too many costs little: a mutant is run only against tests that execute its line. Modules not named here have the tests
# of the engine and the file called like themselves.
TESTS: dict[str, tuple[str, ...]] = {
    "domain/timer": (*_unit("domain", "timer", "settle"), *_ENGINE, *_STORES),
    "domain/settle": (*_unit("domain", "settle", "timer"), *_unit("deliveries", "webhook"), *_ENGINE),
    "domain/headers": (*_unit("domain", "headers"), *_unit("deliveries", "webhook"), "tests/unit/test_wire.py"),
    "domain/secrets": (*_unit("domain", "secrets"), *_unit("deliveries", "signing"), "tests/unit/test_wire.py"),
    "domain/instants": (*_unit("domain", "instants"), "tests/unit/test_config.py", "tests/unit/api/test_encode.py"),
    "store": (*_ENGINE, *_STORES),
    "api/peer_server": _PEERS,
    "cluster/forwarding": _PEERS,
    "cluster/peer_client": _PEERS,
    "cluster/peer_protocol": _PEERS,
    "wire": ("tests/unit/test_wire.py", *_unit("http", "http_client", "server_connection")),
    "deliveries/egress": _unit("deliveries", "egress", "webhook"),
    "deliveries/webhook": _unit("deliveries", "webhook", "egress", "signing"),
}

SURVIVED, BY_TESTS, BY_SIMULATOR = 0, 10, 11  # exit codes of the process of a mutant
# Databases of tests are made in memory, where a sync is fast, if possible.
IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108
MEMORY_MAX = 4 << 30  # bytes: a mutant that allocates without end must not use up the memory of the machine


class Patience:
    seconds = 10.0  # that a test may take on top of five times its usual time


PATIENCE = Patience()


class Judgement(Struct, frozen=True, forbid_unknown_fields=True):
    """A survivor that somebody looked at, and why no test has to notice it."""

    module: str
    line: str
    change: str
    reason: str


class Target(Struct, frozen=True):
    name: str  # as in the table: "stores/memory"
    path: Path
    tests: tuple[str, ...]


class Measured(Struct):
    """What the tests and the simulator do without a mutant."""

    failure: str = ""
    seconds: dict[str, float] = {}
    lines: dict[str, set[tuple[str, int]]] = {}  # of each test: (file, line)
    simulated: set[tuple[str, int]] = set()


class Found(Struct, frozen=True):
    target: Target
    mutant: Mutant
    status: int  # an exit code of above, or minus the signal that ended it


# --- in the process of a mutant ------------------------------------------------------------------


class OneModuleMutated(SourceFileLoader):
    """Imports one module from other source text than that of its file."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        super().__init__(name, str(path))
        self._source = source

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(self.name, self.path, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def exchange_functions(code: CodeType, functions: list[FunctionType]) -> bool:
    """Give functions of a module the code of a changed one, which saves importing everything again. False: some could
    not be changed, or none is different."""
    codes = list(_codes(code))
    names = Counter((each.co_qualname, each.co_firstlineno) for each in codes)
    changed = {(each.co_qualname, each.co_firstlineno): each for each in codes}
    exchanged, left = 0, 0
    for function in functions:
        old = function.__code__
        new = changed.get((old.co_qualname, old.co_firstlineno), old)
        if old.co_filename != code.co_filename or new == old:
            continue
        if names[new.co_qualname, new.co_firstlineno] > 1 or new.co_freevars != old.co_freevars:
            left += 1
        else:
            function.__code__ = new
            exchanged += 1
    return exchanged > 0 and left == 0


def exchange_constants(code: CodeType) -> bool:
    """Give a module that is imported already the plain values that the changed one would have. That is not all of what
    an import does, so a mutant that survives this is imported; but most do not survive, and this is much faster."""
    [module] = [each for each in sys.modules.values() if getattr(each, "__file__", None) == code.co_filename]
    fresh: dict[str, Any] = {"__name__": module.__name__, "__file__": code.co_filename}
    exec(code, fresh)  # noqa: S102
    different = {name: value for name, value in fresh.items() if _is_plain(value) and vars(module).get(name) != value}
    vars(module).update(different)
    return bool(different)


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.keys())) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | frozenset):
        return type(value) in (list, tuple, frozenset) and all(map(_is_plain, value))
    return type(value) in (str, bytes, int, float, bool)


def import_again(target: Target, mutant: Mutant) -> None:
    """Forget the package and all tests, so that the next import finds the mutant."""
    own = (str(ROOT / "src"), str(ROOT / "tests"), str(target.path.parent))
    name = target.path.stem
    for module_name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file == str(target.path):
            name = module_name
        if file.startswith(own):
            del sys.modules[module_name]
    sys.meta_path.insert(0, OneModuleMutated(name, target.path, mutant.source))


class Failures:
    """Ends the process with the first failure."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os._exit(BY_TESTS)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            os._exit(BY_TESTS)


class FirstFailure:
    """Records the failure, for the run without a mutant."""

    first = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.first = self.first or f"{report.nodeid}\n{report.longreprtext}"


class InOrder(Failures):
    """For tests that were imported again: the fastest first, each with its time limit."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._seconds.get(item.nodeid, 0.0))

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        limit(self._seconds.get(item.nodeid, 1.0))


def limit(usual_seconds: float) -> None:
    """End this process if what follows takes much longer than usual. The mutant counts as killed."""
    signal.setitimer(signal.ITIMER_REAL, PATIENCE.seconds + 5 * usual_seconds)


def play(seeds: int) -> str:
    """Play the first seeds of the simulator. Empty if all went well, else what did not."""
    if not seeds:
        return ""
    from duetime.testing.simulation.cluster import simulate  # not before: the mutant may be part of it

    logging.disable(logging.CRITICAL)
    for seed in range(seeds):
        limit(2.0)
        try:
            violations = simulate(seed).violations
        except Exception as error:
            return f"seed {seed} of the simulator: {error!r}"
        if violations:
            return f"seed {seed} of the simulator: {violations[0]}"
    return ""


# --- in the process that starts them -------------------------------------------------------------


class Mutation:
    """A pytest plugin that instead of running the collected tests once runs them for each mutant."""

    def __init__(self, targets: list[Target], mutants: list[tuple[Target, Mutant]], jobs: int, seeds: int) -> None:
        self.failure = ""
        self.found: list[Found] = []
        self._targets = targets
        self._mutants = mutants
        self._jobs = jobs
        self._seeds = seeds
        self._measured = Measured()
        self._items: dict[str, list[pytest.Item]] = {}
        self._functions: list[FunctionType] = []
        self._running: dict[int, tuple[Target, Mutant, str]] = {}
        self._told_at = time.monotonic()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failure = self.failure or f"{report.nodeid}\n{report.longreprtext}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if self.failure:
            return True
        for target in self._targets:
            self._items[target.name] = [item for item in session.items if _is_one_of(item, target.tests)]
        paths = {str(target.path) for target in self._targets}
        functions = [thing for thing in gc.get_objects() if isinstance(thing, FunctionType)]
        self._functions = [function for function in functions if function.__code__.co_filename in paths]
        self._measured = self._measure(session)
        self.failure = self._measured.failure
        if not self.failure:
            self._run_all()
        return True

    # --- without a mutant ---------------------------------------------------------------------------

    def _measure(self, session: pytest.Session) -> Measured:
        """Run all tests once, in a process of their own, and note which lines each of them executes."""
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
            answer = Path(folder) / "measured"
            pid = os.fork()
            if pid == 0:
                try:
                    _own_process(folder)
                    answer.write_bytes(pickle.dumps(self._measure_here(session)))
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
            if not answer.exists():
                return Measured(failure="the process that runs them ended without an answer")
            measured = pickle.loads(answer.read_bytes())  # noqa: S301 (our own child wrote it)
            assert isinstance(measured, Measured)
            return measured

    def _measure_here(self, session: pytest.Session) -> Measured:
        measured = Measured(seconds={}, lines={}, simulated=set())
        current: set[tuple[str, int, int]] = set()
        for number, target in enumerate(self._targets):
            note = f"__executed_{number}__"
            setattr(builtins, note, lambda first, last, path=str(target.path): current.add((path, first, last)))
            tree = with_notes(target.path.read_text("utf-8"), note)
            exchange_functions(compile(tree, str(target.path), "exec", dont_inherit=True), self._functions)
        failures = FirstFailure()
        session.config.pluginmanager.register(failures)
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            current = set()
            started = time.monotonic()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            measured.seconds[item.nodeid] = time.monotonic() - started
            measured.lines[item.nodeid] = _each_line(current)
            if failures.first:
                measured.failure = failures.first
                return measured
        current = set()
        measured.failure = play(self._seeds)
        measured.simulated = _each_line(current)
        return measured

    # --- with mutants -------------------------------------------------------------------------------

    def _run_all(self) -> None:
        started = time.monotonic()
        for target, mutant in self._mutants:
            while len(self._running) >= self._jobs:
                self._wait()
            self._start(target, mutant)
            self._draw(started)
        while self._running:
            self._wait()
            self._draw(started)
        if sys.stderr.isatty():
            print(file=sys.stderr)

    def _start(self, target: Target, mutant: Mutant) -> None:
        numbers = mutant.used_on or range(mutant.line, mutant.last_line + 1)
        lines = {(str(target.path), line) for line in numbers}
        measured = self._measured
        items = self._items[target.name]
        if mutant.in_function or mutant.used_on:
            items = [item for item in items if measured.lines[item.nodeid] & lines]
        items = sorted(items, key=lambda item: measured.seconds[item.nodeid])
        seeds = self._seeds if lines & measured.simulated or not mutant.in_function else 0
        if not items and not seeds:
            self.found.append(Found(target, mutant, SURVIVED))
            return
        folder = tempfile.mkdtemp(prefix="duetime-mutant-", dir=IN_MEMORY)
        pid = os.fork()
        if pid == 0:
            try:
                _own_process(folder)
                self._be(target, mutant, items, seeds)
            finally:
                os._exit(BY_TESTS)  # an error here is caused by the mutant
        self._running[pid] = (target, mutant, folder)

    def _be(self, target: Target, mutant: Mutant, items: list[pytest.Item], seeds: int) -> NoReturn:
        code = compile(mutant.source, str(target.path), "exec", dont_inherit=True)
        if items:
            limit(10.0)
            items[0].config.pluginmanager.register(Failures())
            if mutant.in_function and exchange_functions(code, self._functions):
                self._run(items)
            else:
                if not mutant.in_function and exchange_constants(code):
                    self._run(items)
                self._import_and_run(target, mutant, items)
        else:
            import_again(target, mutant)
        os._exit(BY_SIMULATOR if play(seeds) else SURVIVED)

    def _run(self, items: list[pytest.Item]) -> None:
        for item, following in zip(items, [*items[1:], None], strict=True):
            limit(self._measured.seconds[item.nodeid])
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def _import_and_run(self, target: Target, mutant: Mutant, items: list[pytest.Item]) -> None:
        limit(10.0)
        import_again(target, mutant)
        nodes = [test for test in target.tests if any(_is_one_of(item, (test,)) for item in items)]
        wanted = {item.nodeid: self._measured.seconds[item.nodeid] for item in items}
        if pytest.main([*PYTEST, *nodes], plugins=[InOrder(wanted)]) != pytest.ExitCode.OK:
            os._exit(BY_TESTS)

    def _wait(self) -> None:
        pid, status = os.wait()
        target, mutant, folder = self._running.pop(pid)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # whatever its tests left running
        shutil.rmtree(folder, ignore_errors=True)
        self.found.append(Found(target, mutant, os.waitstatus_to_exitcode(status)))

    def _draw(self, started: float) -> None:
        """A bar on a terminal; elsewhere a line every half minute."""
        done, count = len(self.found), len(self._mutants)
        now = time.monotonic()
        survived = sum(found.status == SURVIVED for found in self.found)
        left = (now - started) / max(done, 1) * (count - done)
        text = f"{done}/{count} mutants, {survived} survived, {left:.0f} s left"
        if sys.stderr.isatty():
            filled = done * 30 // count
            print(f"\r  {'█' * filled}{'░' * (30 - filled)} {text}   ", end="", file=sys.stderr, flush=True)
        elif now >= self._told_at + 30:
            self._told_at = now
            print(text, file=sys.stderr, flush=True)


# No cache, no capturing (children have no output at all), no report; plugins are imported here already, and say so.
PYTEST = ["-qq", "-s", "-p", "no:cacheprovider", "--no-header", "--no-summary", "-c", str(ROOT / "pyproject.toml")]
PYTEST += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]


def _is_one_of(item: pytest.Item, tests: tuple[str, ...]) -> bool:
    """`tests` are files, or tests in files as pytest names them: file::class::function."""
    name = str(item.path) + item.nodeid[item.nodeid.index("::") :]
    return any(name.startswith((f"{test}::", f"{test}[")) or name == test for test in tests)


def _each_line(ranges: set[tuple[str, int, int]]) -> set[tuple[str, int]]:
    return {(path, line) for path, first, last in ranges for line in range(first, last + 1)}


def _own_process(folder: str) -> None:
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX, MEMORY_MAX))
    os.environ["PYTEST_DEBUG_TEMPROOT"] = folder  # where pytest puts tmp_path
    tempfile.tempdir = folder


# --- the command ---------------------------------------------------------------------------------


def find_target(name: str, tests: list[str] | None) -> Target:
    path = Path(name).resolve()
    if not path.is_file():
        path = PACKAGE / f"{name.removesuffix('.py')}.py"
    if not path.is_file():
        sys.exit(
            f"no module {name}: name a module of {PACKAGE.relative_to(ROOT)} like shard or stores/memory, or a file"
        )
    short = str(path.relative_to(PACKAGE).with_suffix("")) if path.is_relative_to(PACKAGE) else path.stem
    if tests:
        return Target(short, path, tuple(str(Path(test).resolve()) for test in tests))
    files = TESTS.get(short)
    if files is None and short.startswith("stores/"):
        files = _STORES
    if files is None:
        own = f"tests/unit/{short.rpartition('/')[0]}/test_{path.stem}.py".replace("//", "/")
        files = (*((own,) if (ROOT / own).is_file() else ()), *_ENGINE)
    return Target(short, path, tuple(str(ROOT / file) for file in dict.fromkeys(files)))


def read_judgements(file: Path) -> list[Judgement]:
    if not file.is_file():
        return []
    return msgspec.convert(tomllib.loads(file.read_text("utf-8")).get("survivor", []), list[Judgement])


def report(found: list[Found], judgements: list[Judgement], *, whole: bool) -> int:
    """Prints the open survivors and the summary. How many are open."""
    judged = {(entry.module, entry.line, entry.change) for entry in judgements}
    survivors = [each for each in found if each.status == SURVIVED]
    opened = [each for each in survivors if _identity(each) not in judged]
    for each in sorted(opened, key=lambda each: (each.target.name, each.mutant.line)):
        _print_survivor(each)
    if whole:
        modules = {each.target.name for each in found}
        stale = judged - {_identity(each) for each in found}
        for entry in judgements:
            if entry.module in modules and (entry.module, entry.line, entry.change) in stale:
                print(f"stale judgement, no mutant is like this any more: {entry.module}: {entry.line}: {entry.change}")
    for name in dict.fromkeys(each.target.name for each in found):
        _print_summary(name, found, opened)
    return len(opened)


def _identity(found: Found) -> tuple[str, str, str]:
    return found.target.name, found.mutant.text, found.mutant.change


def _print_survivor(found: Found) -> None:
    target, mutant = found.target, found.mutant
    path = target.path.relative_to(ROOT) if target.path.is_relative_to(ROOT) else target.path
    print(f"SURVIVED {path}:{mutant.line}: {mutant.change}")
    before = target.path.read_text("utf-8").splitlines()
    for old, new in zip(before, mutant.source.splitlines(), strict=False):
        if old != new:
            print(f"  - {old}\n  + {new}")
    entry = Judgement(target.name, mutant.text, mutant.change, "")
    print("\n  [[survivor]]", *(f"  {line}" for line in _toml(entry)), "", sep="\n")


def _toml(entry: Judgement) -> list[str]:
    return [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in msgspec.structs.asdict(entry).items()]


def _print_summary(name: str, found: list[Found], opened: list[Found]) -> None:
    statuses = Counter(each.status for each in found if each.target.name == name)
    still_open = sum(each.target.name == name for each in opened)
    timed_out = sum(count for status, count in statuses.items() if status < 0)
    print(
        f"{name}: {statuses.total()} mutants, {statuses[BY_TESTS] + timed_out} killed by tests"
        f" ({timed_out} by time or memory), {statuses[BY_SIMULATOR]} killed by the simulator, "
        f"{statuses[SURVIVED] - still_open} judged, {still_open} open"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", metavar="MODULE", help="shard, stores/memory, or the path of a file")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="these tests instead of those of the table")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default 1)")
    parser.add_argument("--lines", metavar="A-B", help="only mutants of these lines")
    parser.add_argument("--seeds", type=int, default=12, help="seeds of the simulator for each survivor (default 12)")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--survivors", type=Path, default=SURVIVORS, help="the file of judged survivors")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE.seconds,
        metavar="SECONDS",
        help="seconds beyond five times its usual time after which a test counts as failed (default 10)",
    )
    options = parser.parse_args()
    PATIENCE.seconds = options.patience
    sys.path.insert(0, str(ROOT / "src"))
    os.environ["PYTHONPATH"] = str(ROOT / "src")
    first, _, last = (options.lines or f"1-{sys.maxsize}").partition("-")
    targets = [find_target(name, options.tests) for name in options.modules]
    mutants = [
        (target, mutant)
        for target in targets
        for mutant in mutants_of(target.path.read_text("utf-8"))
        if int(first) <= mutant.line <= int(last or first)
    ]
    if options.list:
        for target, mutant in mutants:
            print(f"{target.name}:{mutant.line}: {mutant.change}")
        return 0
    if not mutants:
        print("no mutants")
        return 0
    # The same examples each time, none kept, and none made smaller: only whether there is one matters.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutate", database=None, derandomize=True, deadline=None, phases=phases)
    hypothesis.settings.load_profile("mutate")
    mutation = Mutation(targets, mutants, options.jobs, options.seeds)
    files = list(dict.fromkeys(test for target in targets for test in target.tests))
    code = pytest.main([*PYTEST, *files], plugins=[mutation])
    if code is pytest.ExitCode.INTERRUPTED and mutation.found:
        print(f"\ninterrupted: {len(mutation.found)} of {len(mutants)} mutants were tried")
        report(mutation.found, read_judgements(options.survivors), whole=False)
        return 130
    if mutation.failure or code is not pytest.ExitCode.OK:
        print(
            f"the tests fail without a mutant:\n{mutation.failure or f'pytest ended with code {code}'}", file=sys.stderr
        )
        return 2
    return 1 if report(mutation.found, read_judgements(options.survivors), whole=not options.lines) else 0


if __name__ == "__main__":
    sys.exit(main())
