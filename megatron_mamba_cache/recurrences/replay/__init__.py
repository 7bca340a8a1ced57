"""Replayed states: a base state, a ring of the tokens after it, and folds at absolute positions."""
