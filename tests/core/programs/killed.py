"""Rank 1 dies, by a signal that it cannot answer, while the others wait for its numbers."""

from __future__ import annotations

import os
import signal
import time

from setting import this_device

from core import distributed

distributed.start(this_device(), timeout_s=600)
distributed.sum_over_ranks([0.0])
began = time.monotonic()
try:
    if distributed.rank() == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.sum_over_ranks([1.0])
finally:
    print(time.monotonic() - began)
