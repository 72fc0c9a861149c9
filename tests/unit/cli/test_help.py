"""What is printed without a command."""

from __future__ import annotations

from command_line import Run


def test_without_a_command_it_prints_an_overview(run: Run) -> None:
    code, out, _ = run()
    assert code == 0
    assert all(command in out for command in ("duetime demo", "duetime serve", "duetime timer create"))


def test_a_group_without_a_command_prints_its_help(run: Run) -> None:
    code, out, _ = run("timer")
    assert code == 2
    assert "fire-now" in out


def test_the_help_names_the_exit_codes(run: Run) -> None:
    assert "exit codes:" in run("--help")[1]
