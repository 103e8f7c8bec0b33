"""One file for each library whose state Torpor knows."""
