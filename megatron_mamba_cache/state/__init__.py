"""What lives on the device: the state pool, the buffers of a step, and who owns each slot."""
