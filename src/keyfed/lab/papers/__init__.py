"""Published code and slides as they are, defects included, to show where printed numbers come from."""
