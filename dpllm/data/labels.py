"""Labels as all of the ecosystem writes them.

Place in the flow: below everything that makes or reads labels.
"""

IGNORE = -100
"""Labels with this value are no targets."""
