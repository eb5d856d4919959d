"""One file per codebase's naming of its agents, to and from one canonical tree."""
