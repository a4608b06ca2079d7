"""Properties that hold whatever the model: sensitivity and invariance of the clipped sum."""
