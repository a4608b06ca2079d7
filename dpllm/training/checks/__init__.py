"""Checks during a run, so that the printed ε is that of the program that ran."""
