"""Where two recorded runs part."""
