"""Read Hugging Face model directories; read and write Megatron distributed checkpoints."""
