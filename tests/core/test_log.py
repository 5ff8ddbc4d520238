"""Messages on the terminal and in a file."""

import logging

from k3train.core import log

LOG = logging.getLogger("k3train.somewhere")


def test_messages_are_plain_on_the_terminal_and_timed_in_the_file(capsys, tmp_path):
    with log.shown("stdout"), log.to_file(tmp_path / "log.txt"):
        LOG.info("step %d", 3)
        LOG.warning("slow")
    LOG.warning("outside")
    assert capsys.readouterr().out == "step 3\nwarning: slow\n"
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["INFO step 3", "WARNING slow"]


def test_other_processes_show_warnings_only(capsys):
    with log.shown("stderr"):
        log.show_warnings_only()
        LOG.info("hidden")
        LOG.error("seen")
    assert capsys.readouterr().err == "error: seen\n"
