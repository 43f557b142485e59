"""What two processes tell each other: whole again however it was cut, and refused where it is no message."""

import json
import socket

import pytest

from tilestack.engine.messages import LONGEST, Frames, Malformed, Sender, framed, read_message
from tilestack.engine.outputs import Delta, TokenLogprob

SAID = [
    ["news", [(3, 16, Delta(0, (5, 6), "é\ud83d", (TokenLogprob(5, float("-inf"), ((5, -0.1), (7, -2.0))),)))], [], []],
    ["cancel", 2**64 - 1],
    ["end"],
]
HEARD = [["news", [[3, 16, [0, [5, 6], "é\ud83d", [[5, float("-inf"), [[5, -0.1], [7, -2.0]]]], None, None, None, []]]], [], []], *SAID[1:]]  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_messages_are_whole_however_they_are_cut(size):
    sent, frames = b"".join(map(framed, SAID)), Frames()
    heard = [message for place in range(0, len(sent), size) for message in frames.feed(sent[place : place + size])]
    assert heard == HEARD
    assert not frames.unread


@pytest.mark.parametrize("said", ["{", "{}", "[]", "[1]", '"end"', "[" * 100_000, "\xff"])
def test_what_is_no_message_is_refused(said):
    sent = said.encode("latin-1")
    with pytest.raises(Malformed):
        Frames().feed(len(sent).to_bytes(4, "little") + sent)
    with pytest.raises(Malformed, match="bytes"):
        Frames().feed((LONGEST + 1).to_bytes(4, "little"))


def test_a_sender_never_waits_and_keeps_what_is_not_taken():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, long = Sender(ours), ["x" * 10_000_000]
        sender.send(long)
        assert 0 < len(sender.unsent) < 10_000_000
        theirs.settimeout(60)
        frames, heard = Frames(), []
        while not heard:
            heard = frames.feed(theirs.recv(1 << 20))
            sender.flush()
        assert heard == [long]
        theirs.close()
        sender.send(long)  # nobody is there, which is found out by reading
        assert not sender.unsent


def test_one_message_is_read_and_no_byte_more():
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            for message in SAID:
                ours.sendall(framed(message))
        assert [read_message(theirs) for _ in SAID] == HEARD
        assert read_message(theirs) is None, "the other side is gone"
    assert json.loads(framed(["a"])[4:]) == ["a"]
