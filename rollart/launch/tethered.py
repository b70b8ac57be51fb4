"""``python -m rollart.launch.tethered PARENT COMMAND…``: run a program that ends when process PARENT does."""

from __future__ import annotations

import os
import sys

from rollart.workers.worker import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
