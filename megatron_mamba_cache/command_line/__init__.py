"""The command line: generate and doctor."""
