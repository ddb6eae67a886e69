"""An iterator that is worked out in a thread of its own, some items ahead of who takes them."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class _Over:
    """The end of the items, and the error that was it, if one was."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Ahead(Generic[T]):
    """Order and values are the iterator's own, whatever the threads' timing. An error comes where its item would.

    An iterator that takes long may give None between its items, which is left out: there it can be ended.
    """

    def __init__(self, make: Callable[[], Iterator[T]], count: int) -> None:
        self._items: queue.Queue[T | _Over] = queue.Queue(maxsize=count)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(make,), name="penstock-data", daemon=True)
        self._thread.start()

    def _work(self, make: Callable[[], Iterator[T]]) -> None:
        error: BaseException | None = None
        try:
            for item in make():
                if self._closed.is_set() or (item is not None and not self._put(item)):
                    return
        except BaseException as caught:  # noqa: BLE001  it is raised where the item is taken
            error = caught
        self._put(_Over(error))

    def _put(self, item: "T | _Over") -> bool:
        while not self._closed.is_set():
            with suppress(queue.Full):
                self._items.put(item, timeout=0.1)
                return True
        return False

    def __iter__(self) -> Iterator[T]:
        while True:
            item = self._items.get()
            if isinstance(item, _Over):
                self._items.put(item)  # whoever asks again gets the same answer
                if item.error is not None:
                    raise item.error
                return
            yield item

    def close(self) -> None:
        self._closed.set()
        self._thread.join()


@contextmanager
def ahead(make: Callable[[], Iterator[T]], count: int) -> Iterator[Iterator[T]]:
    """The items of ``make()``, up to ``count`` of which wait. Within the context; afterwards the thread has ended."""
    worker = _Ahead(make, count)
    try:
        yield iter(worker)
    finally:
        worker.close()
