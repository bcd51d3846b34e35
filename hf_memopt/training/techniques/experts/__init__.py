"""Experts of a mixture in 4 bits: fused ones, which bitsandbytes leaves in 16."""
