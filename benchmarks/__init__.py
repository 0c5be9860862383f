"""Measurements: ``python -m benchmarks``. Not part of the package."""
