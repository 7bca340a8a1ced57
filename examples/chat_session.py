"""Chat in the terminal, like `mamba-cache chat`; shows the cached tokens and time to first token of each turn.

python -m megatron_mamba_cache serve &
python examples/chat_session.py
"""

import sys

from megatron_mamba_cache.command_line.main import main

if __name__ == "__main__":
    sys.exit(main(["chat", *sys.argv[1:]]))
