"""`python -m torch_odt` is `torch-odt`."""

from __future__ import annotations

import sys

from torch_odt.cli import main

if __name__ == "__main__":
    sys.exit(main())
