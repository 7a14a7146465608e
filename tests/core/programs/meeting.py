"""Starts the process group and adds up ones; an error is one line, as a recipe's is.

Arguments: timeout, reach; and if they are to be others than preflight's own, the seconds until a warning, and those
that a refusal by another machine is borne.
"""

from __future__ import annotations

import os
import sys
import time

from setting import this_device

from core import distributed, preflight
from core.errors import exit_with_one_line


def main() -> None:
    began = time.monotonic()
    if sys.argv[3:]:
        preflight.WARN_S, preflight.REFUSED_S = map(float, sys.argv[3:])
    try:
        distributed.start(this_device(), int(sys.argv[1]), reach_s=float(sys.argv[2]))
        print(distributed.sum_over_ranks([1.0]), os.environ["GLOO_SOCKET_IFNAME"])
        distributed.stop()
    finally:
        print(time.monotonic() - began)


exit_with_one_line(main)
