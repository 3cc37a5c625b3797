"""The errors that a user can cause here."""


class ShapeError(ValueError):
    """A shape that no model can have: says the value, what is allowed and what to change."""


class TopologyError(ValueError):
    """A topology that does not exist or an option it does not have."""
