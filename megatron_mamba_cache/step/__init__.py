"""One engine step: its requests, their layout on the device, sampling and verification. Does not import megatron."""
