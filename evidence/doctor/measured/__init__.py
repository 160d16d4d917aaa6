"""What is measured of a step that is finite: the errors of its modules, and the range of its gradients."""
