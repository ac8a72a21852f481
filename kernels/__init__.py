"""Triton kernels, imported by the op that launches them; this file imports none. See rz.ops."""
