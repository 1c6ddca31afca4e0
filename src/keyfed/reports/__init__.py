"""What people read of a run: pages, figures, the generated reference."""
