"""``python -m lightning_compress``."""

import sys

from lightning_compress.command import main

sys.exit(main())
