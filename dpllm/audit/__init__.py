"""Attacks on one's own model, and what they prove: empirical lower bounds on ε.

Place in the flow: beside training. Everything here tries to show that a claim (ε, δ) is untrue. A bound above ε refutes
the claim; one below it proves nothing, and every result says so. Below stand the statistics (`families`, `bounds`,
`roc`, `result`, `figure`), which need no model; above them what makes the scores that they judge.
"""
