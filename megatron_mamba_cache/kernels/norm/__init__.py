"""RMS norms, with or without a gate, over all channels or over groups of channels."""
