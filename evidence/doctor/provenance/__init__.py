"""Where what is not finite comes from."""
