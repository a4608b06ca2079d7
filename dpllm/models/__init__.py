"""Load a pretrained model, refuse an unsuitable one, and compute one loss per row."""
