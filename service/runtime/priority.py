"""The priority of threads that compute."""

import contextlib
import os
import sys
import threading
from typing import Final

NICER: Final = 5  # steps of niceness; Linux then gives a core at once to a thread that waits for it


def give_way() -> None:
    """Lower the priority of the calling thread, and of threads that it starts, so that threads that serve requests do not wait until it
    pauses: they need a core for a short time only. (The threads that ONNX Runtime starts for a session keep their priority.) Does nothing
    where the system forbids it, or elsewhere than on Linux, where a thread has a priority of its own.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICER)
