"""The way into the engine thread: bounded for callers, never for the engine's own completions."""

import threading

import pytest

from moorage.engine.errors import EngineClosed, MailboxFull
from moorage.engine.mailbox import Mailbox


def test_a_full_mailbox_refuses_and_says_its_bound() -> None:
    mailbox: Mailbox[str] = Mailbox(2)
    mailbox.put("a")
    mailbox.put("b")
    with pytest.raises(MailboxFull, match="the bound is 2"):
        mailbox.put("c")
    mailbox.complete("done")  # completions are bounded where jobs start
    assert mailbox.take_all(0) == ["a", "b", "done"]
    mailbox.put("c")
    assert mailbox.take_all(0) == ["c"]


def test_a_sleeping_receiver_is_woken_by_a_command() -> None:
    mailbox: Mailbox[str] = Mailbox(2)
    received: list[str] = []
    receiver = threading.Thread(target=lambda: received.extend(mailbox.take_all(30)))
    receiver.start()
    mailbox.put("wake")
    receiver.join(10)
    assert received == ["wake"]


def test_close_wakes_the_receiver_and_refuses_commands() -> None:
    mailbox: Mailbox[str] = Mailbox(2)
    receiver = threading.Thread(target=lambda: mailbox.take_all(30))
    receiver.start()
    mailbox.close()
    receiver.join(10)
    assert not receiver.is_alive()
    with pytest.raises(EngineClosed):
        mailbox.put("late")
