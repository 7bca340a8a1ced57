"""Decode and verify steps of Gated DeltaNet that replay states from a base state and a ring of the tokens after it."""
