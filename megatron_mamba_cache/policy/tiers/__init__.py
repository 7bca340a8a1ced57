"""What is kept below the device, and what is on its way between the tiers; no torch, no files."""
