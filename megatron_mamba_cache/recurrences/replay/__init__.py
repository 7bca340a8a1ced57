"""Rings and folds of replayed states, for all recurrences: an older state, a ring of later entries, and their folds."""
