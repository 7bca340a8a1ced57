"""Activations between the two products of dense feed-forward layers and shared experts."""
