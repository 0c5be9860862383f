"""Find the fewest fp32 rules that keep a model's error within a tolerance."""
