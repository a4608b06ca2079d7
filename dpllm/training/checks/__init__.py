"""What is checked while a run goes on, so that the program that ran is the one whose ε is printed."""
