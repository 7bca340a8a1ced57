"""Decode and verify steps without a draft window: a checkpoint, and the inputs of the tokens that follow it."""
