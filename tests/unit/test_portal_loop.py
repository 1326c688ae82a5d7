"""What may happen to a portal's event loop: files closed while it waits for them, callbacks that want to exit, its own end."""

from __future__ import annotations

import asyncio
import selectors
import socket
import threading
from collections.abc import Iterator

import pytest

from rlsandbox import errors
from rlsandbox._portal import Portal
from rlsandbox._turns import _Selector

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def portal() -> Iterator[Portal]:
    portal = Portal("test-portal")
    yield portal
    portal.close()


@pytest.mark.parametrize("what", ["closed", "unregistered", "modified", "replaced", "nothing"])
def test_what_a_turn_does_to_a_file_that_was_found_ready(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    others: list[socket.socket] = []
    selector = _Selector()
    selector.baton.acquire()
    selector.register(ours, selectors.EVENT_READ, "data")
    theirs.send(b"x")
    select = selectors.DefaultSelector.select

    def then_a_turn(self: _Selector, timeout: float | None = None) -> object:
        found = select(self, timeout)
        with self.baton:  # released while the loop waits
            self.turns += 1
            if what == "modified":
                self.modify(ours, selectors.EVENT_WRITE, "else")
            elif what != "nothing":
                self.unregister(ours)
            if what in ("closed", "replaced"):
                number = ours.fileno()
                ours.close()
                if what == "replaced":
                    others.extend(socket.socketpair())
                    assert others[0].fileno() == number
                    self.register(others[0], selectors.EVENT_READ, "else")
        return found

    monkeypatch.setattr(selectors.DefaultSelector, "select", then_a_turn)
    found = selector.select(10)
    monkeypatch.undo()
    assert [key.data for key, _ in found] == (["data"] if what == "nothing" else [])
    selector.close()
    for one in (ours, theirs, *others):
        one.close()


def test_calls_while_asyncio_is_debugged(portal: Portal) -> None:
    """``python -X dev``: asyncio then refuses to be used from another thread than the loop's own."""

    async def who(rest_s: float) -> int:
        await asyncio.sleep(rest_s)
        return threading.get_ident()

    mine = threading.get_ident()
    for debug in (True, False, True):
        portal.loop.set_debug(debug)
        where = [portal.call(who, rest_s) for rest_s in (0, 0.01)]
        assert where[1] != mine and (where[0] != mine or not debug)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_coroutine_that_wants_to_exit_ends_its_own_call(portal: Portal, error: BaseException) -> None:
    async def later() -> None:
        await asyncio.sleep(0.01)  # goes on in the loop's own thread
        raise error

    async def forever() -> str:
        await asyncio.sleep(0.1)
        return "done"

    said: list[object] = []
    other = threading.Thread(target=lambda: said.append(portal.call(forever)))
    other.start()
    with pytest.raises(type(error)):
        portal.call(later)
    other.join()
    assert said == ["done"] and portal.call(forever) == "done"


def test_nobody_waits_for_a_loop_that_broke(portal: Portal, caplog: pytest.LogCaptureFixture) -> None:
    """An error of the loop's own: all calls end with it, those that wait and those that come."""
    began = threading.Event()

    async def forever() -> None:
        began.set()
        await asyncio.sleep(1000)

    ended: list[BaseException] = []

    def wait() -> None:
        try:
            portal.call(forever)
        except BaseException as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert began.wait(30)

    def broken(timeout: float | None = None) -> object:
        raise OSError(22, "a file that is none")

    portal.loop._selector.select = broken  # type: ignore[attr-defined]
    portal.post(lambda: None)
    waiting.join(30)
    assert not waiting.is_alive()
    with pytest.raises(errors.PoolClosedError) as late:
        portal.call(forever)
    for error in [*ended, late.value]:
        assert isinstance(error, errors.PoolClosedError) and error.kind == "broken"
        assert "its event loop broke (OSError: [Errno 22] a file that is none)" in str(error)
    assert len(ended) == 1 and "the event loop of a pool broke" in caplog.text
