"""Text: sources, splits, tokenizers, the cache of token ids."""
