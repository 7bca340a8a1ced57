"""Hugging Face model families: map configurations to architectures, and tensors to Megatron parameters."""
