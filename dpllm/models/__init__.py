"""Reading a pretrained model, refusing one that is not sound, and a loss per row."""
