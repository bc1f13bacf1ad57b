"""Measurements: every figure that the project states comes from a script in here."""
