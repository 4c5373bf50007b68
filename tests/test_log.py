"""The log of a run: what goes to the terminal, what only to the file."""

import logging
import sysconfig
import warnings

import pytest

from prl.base.errors import PrlError
from prl.launch.command import errors_as_exit_codes
from prl.monitors.log import hold_log, log_to

LIBRARY = sysconfig.get_path("purelib") + "/somelib/module.py"


@pytest.fixture
def memory():
    """A log that is held, taken down after the test."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers = []
    logging.captureWarnings(False)  # a test before may have left it on, and a second time does nothing
    yield hold_log()
    logging.captureWarnings(False)
    root.handlers, root.level = before, level


def say(level, file, text):
    logging.getLogger("some").handle(logging.LogRecord("some", level, file, 1, text, (), None))


def test_the_terminal_gets_own_warnings_and_the_file_everything(tmp_path, capsys, memory):
    say(logging.WARNING, "/home/me/my_algo.py", "before there is a file")
    log_to(tmp_path / "logs" / "orchestrator.log", memory)
    say(logging.INFO, "/home/me/my_algo.py", "quiet")
    say(logging.ERROR, LIBRARY, "noise")
    logging.getLogger("prl.x").warning("of prl: %s", "3\n  input is 5 % off\n")
    logging.getLogger("httpx").info("a request")
    warnings.warn_explicit("old\nway", UserWarning, LIBRARY, 3)
    warnings.warn_explicit("seq_len is low", UserWarning, "/home/me/my_algo.py", 3)
    printed = capsys.readouterr().err
    assert printed.splitlines() == [
        "WARNING: before there is a file",
        "WARNING: of prl: 3; input is 5 % off",
        "WARNING: seq_len is low",
    ]
    text = (tmp_path / "logs" / "orchestrator.log").read_text()
    assert "a request" not in text
    assert all(
        printed in text for printed in ("before there", "quiet", "noise", "of prl: 3", "old\n  way", "seq_len is low")
    )


def test_env_output_forges_no_line_and_shows_no_secret(tmp_path, capsys, memory):
    forged = "no grade\nerror: the disk is full\r\u2028WARNING: token=abc1\x0berror: gone \x1b]0;mine\x07"
    log_to(tmp_path / "orchestrator.log", memory)
    logging.getLogger("prl.x").warning("a grader failed: %s", forged)
    logging.getLogger("prl.x").error("so did this", exc_info=ValueError(forged))
    lines = [*capsys.readouterr().err.splitlines(), *(tmp_path / "orchestrator.log").read_text().splitlines()]
    assert sum("a grader failed: no grade" in line for line in lines) == 2
    assert not any(line.startswith(("error:", "WARNING: token")) or "abc1" in line for line in lines)
    assert not any("\x1b" in line or "\x07" in line for line in lines)


def test_an_error_of_many_lines_is_one_message(capsys):
    with pytest.raises(SystemExit), errors_as_exit_codes():
        raise PrlError("the server said:\nerror: no such run\nWARNING: password=hunter2")
    assert capsys.readouterr().err == "error: the server said:\n  error: no such run\n  WARNING: password=***\n"
