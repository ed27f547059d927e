"""Settings of Python's garbage collector for a process that has loaded all that it needs."""

import gc


def keep_loaded() -> None:
    """Take the objects that exist out of the collector's sight, and let it run less often.

    Loaded objects live as long as the process, so the collector need not examine them. Requests create few reference cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
