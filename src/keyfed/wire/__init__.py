"""Real clients: messages, both sides of a session, who may take part."""
