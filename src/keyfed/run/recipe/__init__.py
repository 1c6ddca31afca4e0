"""Settings that are chosen from the corpus: facts, the recipe, the pilot."""
