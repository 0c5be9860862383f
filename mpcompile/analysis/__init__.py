"""Numerical analysis: where rounding error comes from, what it does to gradients, which value overflows first."""
