"""How a recipe is trained: one file per concept."""
