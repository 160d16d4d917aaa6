"""What is watched while somebody's own loop trains."""
