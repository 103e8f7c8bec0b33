"""One file for each way of giving memory back and taking it again."""
