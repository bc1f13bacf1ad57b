"""Triton kernels, each with a launcher of its twin's signature."""
