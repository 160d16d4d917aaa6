"""What is measured about Mantissa: scripts beside the product, which nothing of it imports."""
