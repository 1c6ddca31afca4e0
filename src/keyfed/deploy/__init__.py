"""A federation of real machines: certificates, keys, consent, Flower's processes and ours, from first start to last."""
