"""Flower as the carrier of messages: its client and server side, and what is mended in it."""
