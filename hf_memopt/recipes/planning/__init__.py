"""Choose the fastest set-up of the stock ``Trainer`` that fits a GPU: ``plan``."""
