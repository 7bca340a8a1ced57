"""Cache decisions: plain values in, frozen plans out. Imports neither torch nor megatron."""
