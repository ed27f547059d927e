"""The priority of threads that compute."""

import os
import sys
import threading
from typing import Final

GIVEN: Final = 5  # steps of niceness; Linux then gives a core at once to a thread that waits for it


def give_way() -> None:
    """Lower the priority of the calling thread, so that threads that serve requests do not wait until it pauses: they need a core for a
    short time only. Does nothing elsewhere than on Linux, where a thread has a priority of its own.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + GIVEN)
