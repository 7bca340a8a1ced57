"""Decode and verify steps that replay states from a checkpoint and a ring of the tokens that follow it."""
