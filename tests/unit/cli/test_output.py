"""What commands print: durations, times, tables."""

from __future__ import annotations

import sys

import pytest
from command_line import FAR, Run, start

from duetime.cli.output import Safe, format_duration, format_lateness, format_relative_ms, now_ms, print_table, shorten


def test_texts_of_other_users_send_no_control_sequences_to_the_terminal(at: Run) -> None:
    evil = "a\x1b]0;owned\x07\x1b[2J\u202e"
    for command in (
        ("create", evil, *FAR, "--tag", evil, "--correlation-id", evil),
        ("get", evil),
        ("list", "--prefix", evil),
        ("fire-now", evil),
    ):
        code, out, _ = at("timer", *command)
        assert code == 0
        assert "a\\x1b]0;owned\\x07\\x1b[2J\\u202e" in out
        assert not set(out) & {"\x1b", "\x07", "\u202e"}


@pytest.mark.skipif(sys.platform == "win32", reason="pipes")
def test_a_closed_pipe_is_not_a_traceback() -> None:
    with start("config", "show", "--env") as writer:
        assert writer.stdout is not None
        writer.stdout.close()
        assert writer.stderr is not None
        err = writer.stderr.read()
        writer.wait(timeout=20)
    assert err == ""
    assert writer.returncode in (0, 141)


@pytest.mark.parametrize(
    ("milliseconds", "said"),
    [
        (0, "0 ms"),
        (3, "3 ms"),
        (1_000, "1 s"),
        (1_234, "1.2 s"),
        (29_400, "29 s"),
        (1_799_980, "30 min"),
        (3_600_000, "1 h"),
        (7_500_000, "2 h 5 min"),
        (86_400_000, "1 d"),
        (273_600_000, "3 d 4 h"),
        (40 * 86_400_000 + 1, "40 d"),
    ],
)
def test_durations_are_formatted_in_the_unit_that_suits_them(milliseconds: int, said: str) -> None:
    assert format_duration(milliseconds) == said


def test_times_are_relative_to_now() -> None:
    assert format_relative_ms(now_ms() + 1_800_000) == "in 30 min"
    assert format_relative_ms(now_ms() - 3_600_000) == "1 h ago"
    assert (format_lateness(2), format_lateness(0), format_lateness(None)) == ("2 ms late", "on time", "")
    assert shorten("a" * 10, 5) == "aaaa…"


def test_styled_cells_do_not_shift_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["a", "b"], [(Safe("\033[31mred\033[0m"), "x"), ("plain", "y")])
    assert capsys.readouterr().out.splitlines() == ["a      b", "\033[31mred\033[0m    x", "plain  y"]
