"""Options of a run: their declaration, their values from files and the command line, and how they are stored."""
