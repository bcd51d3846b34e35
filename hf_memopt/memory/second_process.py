"""Make calls of a function in a second process before they are asked for, so that a comparison uses two cores.

The second process is a fork, which has everything that was imported and built. It works on the calls that are expected
and sends their results. The caller asks for results in its own order, and makes the calls itself that the second
process has not begun: two processes change when an answer is there, never what it is.

Only where a fork is safe (``_can_fork``); elsewhere, and where the second process ends early, all calls are made here.

Results come back pickled, and with them the recordings that were made for them, so that later calls here reuse these.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import torch

from hf_memopt.memory.recording.trace_cache import keep_trace, kept_traces
from hf_memopt.memory.without_compiler import without_compiler

__all__ = ["Ahead", "calls_ahead"]

Key = TypeVar("Key", bound=Hashable)
Found = TypeVar("Found")

MOST_SECONDS = 120.0  # that a call takes in the second process before it counts as stuck
BEGUN, DONE, FAILED = "begun", "done", "failed"


class Ahead(Generic[Key, Found]):
    """A function of which expected calls may be made in a second process."""

    def __init__(self, function: Callable[[Key], Found]) -> None:
        self._function = function
        self._begun: set[Key] = set()
        self._found: dict[Key, Found] = {}
        self._connection: Connection | None = None

    def start(self) -> None:
        """Fork the second process."""
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._function, theirs, self._connection), daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 and later count the threads of numpy's BLAS too, which the second process does not use
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()  # so that the end of the process ends the connection

    def expect(self, keys: Sequence[Key]) -> None:
        """Let the second process make these calls, the last one first, in place of those it was to make before."""
        if self._connection is not None:
            try:
                self._connection.send(list(keys))
            except OSError:
                self.close()

    def __call__(self, key: Key) -> Found:
        """Return the result of a call."""
        while self._connection is not None and (self._connection.poll(0) or key in self._begun):
            self._receive()
        return self._found.pop(key) if key in self._found else self._function(key)

    def _receive(self) -> None:
        """Read a message, or end the second process where none comes."""
        assert self._connection is not None
        try:
            if not self._connection.poll(MOST_SECONDS):
                raise TimeoutError
            what, key, found, recordings = self._connection.recv()
        except (EOFError, OSError):  # it has ended, or hangs
            self.close()
            return
        if what == BEGUN:
            self._begun.add(key)
            return
        self._begun.discard(key)
        if what == DONE:  # else the same call raises the error here
            self._found[key] = found
            for of, recorded in pickle.loads(recordings):
                keep_trace(of, recorded)

    def close(self) -> None:
        """End the second process."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._process.kill()
            self._process.join()
            self._process.close()


@contextmanager
def calls_ahead(function: Callable[[Key], Found], expected: Sequence[Key] = ()) -> Iterator[Ahead[Key, Found]]:
    """Yield ``function``, with a second process inside that makes expected calls of it.

    Args:
        function: the same result for the same key, without side effects that matter; of tensors on the meta device.
        expected: keys in the order in which results will be asked for; the second process begins with the last.
    """
    ahead = Ahead(function)
    if _can_fork():
        ahead.start()
        ahead.expect(expected)
    try:
        yield ahead
    finally:
        ahead.close()


def _can_fork() -> bool:
    """Return whether a second process can be forked from this one, and has a core of its own.

    A fork has the main thread alone: locks that other threads hold would stay locked in it, and CUDA cannot be used in
    it once it was started here. Threads of torch's and numpy's own are no problem: operations on the meta device have
    no threads.
    """
    # tqdm's monitor, which stays after the first bar, sleeps, and a fork draws no bars
    threads = [thread for thread in threading.enumerate() if type(thread).__name__ != "TMonitor"]
    return (
        sys.platform == "linux"
        and len(os.sched_getaffinity(0)) > 1
        and threads == [threading.main_thread()]
        and threading.current_thread() is threading.main_thread()
        and not multiprocessing.current_process().daemon  # which may have no processes of its own
        and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    )


# ---- In the second process ------------------------------------------------------------------------------------------


def _serve(function: Callable[[Any], Any], connection: Connection, other_end: Connection) -> None:
    """Make the expected calls until the first process ends this one, or itself."""
    other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the first process ends this one
    warnings.simplefilter("ignore")
    try:
        torch.set_num_threads(1)
        # where a backward pass had started threads for a GPU before the fork, torch refuses this one
        torch.autograd.backward(torch.ones((), device="meta", requires_grad=True).clone())
        messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_send, args=(messages, connection), daemon=True).start()
        with without_compiler():
            _make_calls(function, connection, messages)
    except (EOFError, OSError, RuntimeError):
        pass  # without a second process the first makes all calls


def _make_calls(function: Callable[[Any], Any], connection: Connection, messages: queue.SimpleQueue[Any]) -> None:
    keys: list[Any] = []
    made: set[Any] = set()
    while True:
        while connection.poll(0) or not keys:
            keys = [key for key in connection.recv() if key not in made]
        key = keys.pop()
        made.add(key)
        messages.put((BEGUN, key, None, b""))
        known = kept_traces()
        try:
            found = function(key)
        except Exception:
            messages.put((FAILED, key, None, b""))
        else:
            messages.put((DONE, key, found, _recordings(known)))


def _recordings(known: Mapping[Any, Any]) -> bytes:
    """Return the recordings that were made since, pickled; none where what they depend on cannot be.

    What replays derived from them stays here: to read it would take longer than to derive it again.
    """
    new = [(key, recorded) for key, recorded in kept_traces().items() if key not in known]
    try:
        return pickle.dumps([(key, replace(one, trace=replace(one.trace, replayed={}))) for key, one in new])
    except (pickle.PicklingError, AttributeError, TypeError):  # a function within another one, say
        return pickle.dumps([])


def _send(messages: queue.SimpleQueue[Any], connection: Connection) -> None:
    """Send results while the next call runs: a result may be more than the connection takes before it is read."""
    try:
        while True:
            connection.send(messages.get())
    except Exception:  # the first process has ended, or a result cannot be pickled
        os._exit(1)
