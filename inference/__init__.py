"""What a trained model is used for: the commands evaluate, predict and generate. ``load.py`` finds and opens it."""
