"""Where a run's weights come from before its first round."""
