"""What image classification needs besides the recipe: losses, architectures, pretrained weights, exported folders."""
