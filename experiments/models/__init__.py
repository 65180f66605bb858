"""Models: classifiers (`experiments.models.registry`) and language models."""

from experiments.models.language_models import build_language_model, load, save

__all__ = ["build_language_model", "load", "save"]
