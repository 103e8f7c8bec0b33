"""One file for each place where bytes wait."""
