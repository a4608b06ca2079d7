"""The label convention of the ecosystem.

Place in the flow: below everything that makes or reads labels.
"""

IGNORE = -100
"""Labels with this value are not targets."""
