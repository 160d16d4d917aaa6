"""Which layers of a model need more bits than a scaled format has."""
