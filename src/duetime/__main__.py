"""`python -m duetime`."""

from __future__ import annotations

import sys

from duetime.cli import main

if __name__ == "__main__":
    sys.exit(main())
