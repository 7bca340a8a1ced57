"""Products of a step's tokens with the weights of linear layers."""
