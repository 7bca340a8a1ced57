"""The command line: generate, serve and doctor."""
