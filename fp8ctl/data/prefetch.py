"""Making what comes next while something else is running."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """Makes the next few results of `make(place)` in a thread. What is taken is what was asked for, made ahead or not.

    A thread and no process: making a batch is copying from memory maps, which leaves the interpreter free.
    """

    def __init__(self, make: Callable[[int], T], depth: int) -> None:
        """`depth`: how many to make ahead; with 0 there is no thread."""
        self._make = make
        self._depth = depth
        self._pool = ThreadPoolExecutor(1, "batches") if depth else None
        self._made: dict[int, Future[T]] = {}

    def take(self, place: int, stride: int) -> T:
        """`make(place)`; then begins with the places that follow, `stride` apart.

        Raises:
            Exception: whatever `make(place)` raised.
        """
        if self._pool is None:
            return self._make(place)
        wanted = range(place, place + stride * (self._depth + 1), stride)
        for old in [p for p in self._made if p not in wanted]:
            self._made.pop(old).cancel()
        for one in wanted:
            if one not in self._made:
                self._made[one] = self._pool.submit(self._make, one)
        return self._made.pop(place).result()

    def forget(self) -> None:
        """Throws away what was made ahead."""
        for future in self._made.values():
            future.cancel()
        self._made.clear()

    def close(self) -> None:
        """Ends the thread; nothing can be taken afterwards."""
        self.forget()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
