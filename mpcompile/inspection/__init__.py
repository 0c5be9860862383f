"""What a user can see: reports of compiled graphs, and ``explain``."""
