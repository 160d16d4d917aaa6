"""The largest batch that fits, and the trials that forecasts are checked against."""
