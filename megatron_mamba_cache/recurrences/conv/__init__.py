"""The causal convolution: prefill over packed rows, verification of drafts, and the windows it keeps."""
