"""Background threads end before the interpreter does."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

from gear_loader.utils.background import background_thread

BEGIN = """
import atexit, threading, time
from gear_loader.utils import background
"""
IN_CPP = """
import torch.distributed as dist

class Writer:
    def __init__(self):
        self.store, self.over = dist.TCPStore("127.0.0.1", 0, 1, True), False
        background.background_thread(self.run, "writer", stop=self.stop).start()
        background.background_thread(self.sleep, "sleeper").start()
        atexit.register(lambda: print("still at work:", not background.is_ending()))

    def run(self):
        while not self.over:
            self.store.set("key", "value")  # waits for the GIL in C++, which aborts once the interpreter ends
        print("ended")

    def sleep(self):
        time.sleep(0.3)
        print("awake")

    def stop(self):
        print(background.is_ending(), [each.name for each in threading.enumerate()[1:]])
        self.over = True

writer = Writer()
print(background.is_ending())
"""
STUCK = """
background._EXIT_TIMEOUT = 0.1
background.background_thread(time.sleep, "sleeper", args=(600,)).start()
"""


def outcome(program: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", BEGIN + program], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_a_thread_in_cpp_ends_before_the_interpreter() -> None:
    expected = "False\nstill at work: True\nTrue ['writer', 'sleeper']\nended\nawake\n"
    assert outcome(IN_CPP) == (0, expected, "")


def test_a_thread_that_does_not_end_is_left() -> None:
    assert outcome(STUCK) == (0, "", "")


def test_a_thread_that_has_ended_keeps_nothing_alive() -> None:
    class Owner:
        def __init__(self) -> None:
            self.ended = threading.Event()
            self.thread = background_thread(self.run, "waiter", stop=self.stop)
            self.thread.start()

        def run(self) -> None:
            self.ended.wait()

        def stop(self) -> None:
            self.ended.set()

    owner = Owner()
    left = [weakref.ref(owner), weakref.ref(owner.thread)]
    owner.stop()
    owner.thread.join()
    del owner
    gc.collect()
    assert [each() for each in left] == [None, None]


def test_a_thread_and_what_stops_it_die_without_callbacks() -> None:
    """Python calls callbacks of weak references while the interpreter ends, and loses what a signal raises in them."""

    class Owner:
        def __init__(self) -> None:
            self.itself, self.thread = self, background_thread(bool, "owner", stop=self.stop)
            self.thread.start()
            self.thread.join()

        def stop(self) -> None:
            pass

    called: list[str] = []
    dead = weakref.ref(Owner())
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_filename))
    try:
        gc.collect()
    finally:
        sys.setprofile(None)
    assert dead() is None
    assert weakref.__file__ not in called
