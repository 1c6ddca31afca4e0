"""Where a round's uploads go: sums in the clear, noised, masked."""
