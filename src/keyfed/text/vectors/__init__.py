"""Word vectors for a vocabulary: the files people have, a transformer's embedding, fewer dimensions."""
