"""Generate text with prefix caching, like `python -m megatron_mamba_cache generate`; see its --help."""

import sys

from megatron_mamba_cache.command_line.main import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
