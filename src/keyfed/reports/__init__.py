"""What people read of a run: pages and figures; a finished run measured again."""
