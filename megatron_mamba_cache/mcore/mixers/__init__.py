"""Mixers of recurrent layers: projections, norm and gate around a recurrence."""
