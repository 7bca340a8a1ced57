"""Linear layers whose results do not depend on how many tokens a step has."""
