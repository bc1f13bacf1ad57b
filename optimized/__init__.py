"""The fast side: the same modules and names as the reference, vectorized."""
