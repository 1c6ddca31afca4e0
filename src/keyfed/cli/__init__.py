"""The command line, and the same from Python."""
