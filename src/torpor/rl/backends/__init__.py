"""One file for each framework that a model can be trained in."""
