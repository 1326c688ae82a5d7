"""Threads that do one thing at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable


def all_at_once(n: int, work: Callable[[int], object], *, within_s: float = 60) -> list[BaseException]:
    """*work* with the numbers below *n*, a thread each, begun together; what they raised, when all have ended."""
    errors: list[BaseException] = []
    together = threading.Barrier(n)

    def one(number: int) -> None:
        try:
            together.wait(within_s)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within_s)
        assert not thread.is_alive()
    return errors
