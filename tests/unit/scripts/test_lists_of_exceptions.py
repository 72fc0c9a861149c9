"""Both lists of exceptions, scripts/mutate_survivors.toml and scripts/prove_unreached.toml, fit the source as it is.

An entry whose module, line or change no longer exists is stale: change it with the source, or delete it.
"""

from __future__ import annotations

from collections import Counter

from scripts.mutate import PACKAGE, SURVIVORS, read_judgements
from scripts.mutations import changes_of
from scripts.prove import read_unreached

from duetime.testing.statement_coverage import MODULES, statements_of


def test_every_judged_survivor_is_a_mutant_of_the_source_and_has_a_reason() -> None:
    entries = read_judgements(SURVIVORS)
    changes = {}
    for module in {entry.module for entry in entries}:
        path = PACKAGE / f"{module}.py"
        changes[module] = changes_of(path.read_text("utf-8")) if path.is_file() else set()
    stale = [
        f"{entry.module}: {entry.line}: {entry.change}"
        for entry in entries
        if (entry.line, entry.change) not in changes[entry.module]
    ]
    assert not stale, f"{len(stale)} of {len(entries)} entries are stale:\n" + "\n".join(stale)
    assert [entry for entry in entries if not entry.reason.strip()] == []


def test_no_survivor_is_judged_twice() -> None:
    counts = Counter((entry.module, entry.line, entry.change) for entry in read_judgements(SURVIVORS))
    assert [entry for entry, count in counts.items() if count > 1] == []


def test_every_statement_listed_as_unreached_exists_and_has_a_reason() -> None:
    known = {(s.module, s.function, s.text) for module in MODULES for s in statements_of(module)}
    entries = read_unreached()
    stale = [
        f"{entry.module}: {entry.function}: {text}"
        for entry in entries
        for text in entry.statements
        if (entry.module, entry.function, text) not in known
    ]
    assert not stale, f"{len(stale)} statements are stale:\n" + "\n".join(stale)
    assert [entry for entry in entries if not entry.reason.strip()] == []
