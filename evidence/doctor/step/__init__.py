"""One optimizer step that can be taken again, the modules in it, and what is found in it."""
