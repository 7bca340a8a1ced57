"""Drafts for decode steps: the drafters, and how many drafts are worth verifying. Imports no megatron."""
