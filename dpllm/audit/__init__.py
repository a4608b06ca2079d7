"""Attacks on your own model, and the empirical lower bounds on ε that they prove.

All code here tries to show that a claim (ε, δ) is untrue. A bound above ε refutes the claim; a bound below ε proves
nothing, and every result says so. The lower layer is the statistics (`bounds`, `result`),
which need no model; the upper layer computes the scores that they judge.
"""
