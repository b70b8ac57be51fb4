"""``python -m rollart.controller [run] CONFIG [key=value …]``"""

from __future__ import annotations

import sys

from rollart.controller.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
