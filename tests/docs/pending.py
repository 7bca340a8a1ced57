"""What the pages name before the code has it; empty once it has."""

FLAGS = {"--coordinator-key-file", "--insecure-coordinator"}
ROUTING_SETTINGS = {"key_file", "insecure", "max_message_bytes", "max_request_bytes", "max_pending_bytes"}
