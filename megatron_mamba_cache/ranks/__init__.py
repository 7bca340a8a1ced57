"""Coordination of the ranks that share one model: equal settings, and detection of differing decisions."""
