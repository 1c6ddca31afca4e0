"""Secure aggregation: keys, shares, masks, and both sides of one sum."""
