"""The largest batch that fits, and the trials that check forecasts."""
