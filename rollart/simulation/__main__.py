"""``python -m rollart.simulation``."""

from __future__ import annotations

import sys

from rollart.simulation.command_line import main

if __name__ == "__main__":
    sys.exit(main())
