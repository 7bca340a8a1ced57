"""The commands of `mamba-cache`."""
