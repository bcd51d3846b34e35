"""What padding costs: the lengths in data files, and the strategies compared."""
