"""One step of the engine: its requests, their layout on the device, and what is computed from it. No megatron."""
