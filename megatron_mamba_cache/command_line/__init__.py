"""Implementation of the `mamba-cache` command line."""
