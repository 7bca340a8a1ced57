"""Kernels for MoE layers: routing, sorting of tokens by expert, and the experts' GEMMs."""
