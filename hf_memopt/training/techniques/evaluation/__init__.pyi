from .recovery import recover_predictions as recover_predictions
