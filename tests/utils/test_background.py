"""Background threads end before the interpreter does."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

from gear_loader.utils.background import start_thread

BEGIN = """
import threading, time
import torch.distributed as dist
from gear_loader.utils import background
"""
IN_CPP = """
class Writer:
    def __init__(self):
        self.store, self.over = dist.TCPStore("127.0.0.1", 0, 1, True), False
        background.start_thread(self.run, "writer", stop=self.stop)
        background.start_thread(time.sleep, "sleeper", args=(0.2,))

    def run(self):
        while not self.over:
            self.store.set("key", "value")  # waits for the GIL in C++, which aborts once the interpreter ends
        print("ended")

    def stop(self):
        print(background.is_ending(), [each.name for each in threading.enumerate()[1:]])
        self.over = True

writer = Writer()
print(background.is_ending())
"""
STUCK = """
background._EXIT_TIMEOUT = 0.1
background.start_thread(time.sleep, "sleeper", args=(600,))
"""


def outcome(program: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", BEGIN + program], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_a_thread_in_cpp_ends_before_the_interpreter() -> None:
    assert outcome(IN_CPP) == (0, "False\nTrue ['writer', 'sleeper']\nended\n", "")


def test_a_thread_that_does_not_end_is_left() -> None:
    assert outcome(STUCK) == (0, "", "")


def test_a_thread_that_has_ended_keeps_nothing_alive() -> None:
    class Owner:
        def stop(self) -> None: ...

    owner, ended = Owner(), threading.Event()
    thread = start_thread(ended.wait, "waiter", stop=owner.stop)
    left = [weakref.ref(owner), weakref.ref(thread)]
    ended.set()
    thread.join()
    del owner, thread
    gc.collect()
    assert [each() for each in left] == [None, None]
