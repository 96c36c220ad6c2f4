"""Kernels in C for float32 on CPUs: products, attention of a decode step, attention over a prefix tree."""
