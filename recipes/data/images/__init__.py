"""Labelled images: sources, squares of pixels, augmentation."""
