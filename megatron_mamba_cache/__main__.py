"""Run the command line with `python -m megatron_mamba_cache`."""

import sys

from .command_line.main import main

if __name__ == "__main__":
    sys.exit(main())
