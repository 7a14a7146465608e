"""Whole lines out of pipes: pieces, bars, and what a keeper sends through an engine that cuts and mixes."""

from __future__ import annotations

import os
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core import lines
from core.lines import FRAME, PIECE, Lines, last_state


def pump(reader: Lines, *, until_closed: bool = True) -> None:
    while reader.streams and reader.turn(200) and until_closed:
        pass


def follow(reader: Lines, rank: int, to: int = 1) -> int:
    """A pipe that the reader follows; returns its end to write to."""
    read_end, write_end = os.pipe()
    reader.follow(os.fdopen(read_end, "rb"), rank, to)
    return write_end


def relayed(sent: bytes, ended=lambda rank, code: None) -> None:
    """Give an engine's reader what keepers sent."""
    reader = Lines("engine", True, ended)
    pipe = follow(reader, 0, to=2)
    feeder = threading.Thread(target=lambda: (lines.write(pipe, sent), os.close(pipe)))
    feeder.start()
    pump(reader)
    feeder.join()


def test_lines_are_marked_and_a_last_line_gets_its_end(capfd):
    reader = Lines("ranks", True, print)
    pipes = [follow(reader, rank) for rank in (0, 1)]
    os.write(pipes[0], b"on")
    os.write(pipes[1], b"two\nthr")
    reader.turn(200)
    os.write(pipes[0], b"e\n")
    os.write(pipes[1], b"ee")
    for pipe in pipes:
        os.close(pipe)
    pump(reader)
    assert sorted(capfd.readouterr().out.splitlines(keepends=True)) == [
        "[rank 0] one\n", "[rank 1] three\n", "[rank 1] two\n"
    ]  # fmt: skip


def test_a_single_rank_is_not_marked(capfd):
    reader = Lines("ranks", False, print)
    pipe = follow(reader, 0, to=2)
    os.write(pipe, b"plain\n")
    os.close(pipe)
    pump(reader)
    assert capfd.readouterr().err == "plain\n"
    assert list(reader.tails[0]) == [b"plain"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [(b"text", b"text"), (b"\r10%\r20%", b"20%"), (b"dos\r", b"dos"), (b"", b""), (b"10%\r100%\r", b"100%")],
)
def test_of_a_bar_the_last_state_is_shown(line, shown):
    assert last_state(line) == shown


def test_a_bar_without_lines_is_shown_now_and_then(capfd, monkeypatch):
    monkeypatch.setattr(lines, "BAR_EVERY", 0.2)
    reader = Lines("ranks", True, print)
    pipe = follow(reader, 0)
    for step in range(20):
        os.write(pipe, b"\rstep %d" % step)
        reader.turn(50)
    first = capfd.readouterr().out.splitlines()
    os.write(pipe, b"\rdone\n")
    os.close(pipe)
    pump(reader)
    assert first[0] == "[rank 0] step 0"
    assert len(first) < 10
    assert capfd.readouterr().out.splitlines()[-1] == "[rank 0] done"


def test_a_reader_that_is_gone_is_noticed(capfd, monkeypatch):
    reader = Lines("ranks", True, print)
    monkeypatch.setattr(lines, "write", lambda *_: (_ for _ in ()).throw(BrokenPipeError))
    reader.emit(0, 1, b"nobody reads this")
    assert reader.lost
    reader.emit(0, 1, b"nor this")


TEXTS = st.lists(st.binary(max_size=20).map(lambda text: text.replace(b"\n", b"").replace(b"\r", b"")), max_size=4)


@settings(max_examples=40, deadline=None)
@given(texts=TEXTS, length=st.integers(0, 3 * PIECE), seed=st.integers(0, 99))
def test_frames_arrive_as_they_were_however_they_are_mixed(texts, length, seed):
    """Two keepers' pieces are interleaved piece by piece, and each rank's lines come out whole and in order."""
    sent = {}
    for rank in (0, 1):
        keeper = Lines("keeper", True, print)
        for text in [*texts, b"x" * length]:
            keeper.emit(rank, 1, b"%d" % rank + text)
        keeper.tell_end(rank, rank + 5)
        sent[rank] = bytes(keeper._frames).split(b"\n")[:-1]
        assert all(len(frame) < 4000 and FRAME.match(frame) for frame in sent[rank])
    order, mixed = random.Random(seed), []
    while any(sent.values()):
        mixed.append(sent[order.choice([rank for rank in sent if sent[rank]])].pop(0))
    got, codes, reader = [], {}, Lines("engine", True, lambda rank, code: codes.update({rank: code}))
    reader.emit = lambda rank, to, line: got.append((rank, to, line))
    for frame in mixed:
        reader._pass_on(lines.Stream(0, 2), frame)
    assert codes == {0: 5, 1: 6}
    for rank in (0, 1):
        assert [line for who, _, line in got if who == rank] == [b"%d" % rank + t for t in [*texts, b"x" * length]]


def test_what_an_engine_says_itself_stays_as_it_is(capfd):
    ends = []
    relayed(
        b"mpirun speaks\n\x1e31.a\n\x1e32+long \nssh speaks\n\x1e32.line\n\x1e3x.7\n", lambda *end: ends.append(end)
    )
    out, err = capfd.readouterr()
    assert out == "[rank 3] a\n"
    assert err == "mpirun speaks\nssh speaks\n[rank 3] long line\n"
    assert ends == [(3, 7)]
