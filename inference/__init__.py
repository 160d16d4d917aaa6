"""What a trained model is used for: the commands evaluate, predict and generate. ``exported.py`` finds and opens it."""
