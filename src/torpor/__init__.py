"""Torpor puts a training actor to sleep and wakes it bit for bit."""
