"""Values that several layers must agree on."""

IGNORE_INDEX = -100
"""Label that carries no loss."""
