"""PATE: teachers on disjoint private units label public texts by a noisy vote, and a student learns the labels.

Place in the flow: beside tuning and audit, above training and query runs.
"""
