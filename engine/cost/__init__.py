"""What a model costs, what it will cost, and which widths are fast."""

from engine.cost.predict import Predictor

__all__ = ["Predictor"]
