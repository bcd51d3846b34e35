"""A few real steps in a process of their own, beside their prediction."""
