"""`python -m compressor` is the command `compress`."""

import sys

from compressor.cli import main

sys.exit(main())
