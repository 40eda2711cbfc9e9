"""Training: stages, pipeline, trainer, metrics."""
