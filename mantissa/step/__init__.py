"""One training step: what it computes, in which dtypes, and what memory it holds."""
