"""Proofs on the device at hand, and the compile table of the kernels."""
