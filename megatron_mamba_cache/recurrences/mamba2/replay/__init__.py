"""Decode and verify steps that replay states from a base state and a ring of the tokens after it."""
